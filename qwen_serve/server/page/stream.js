// The server's API: the model's name, and one answer as it streams.

export class ServerError extends Error {
  constructor(message, status, code = null) {
    super(message);
    Object.assign(this, { status, code });
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  const text = await response.text();
  let said = {};
  try {
    said = JSON.parse(text).error ?? said;
  } catch { /* not this server's: a proxy's page, say */ }
  return new ServerError(said.message ?? `${response.status} ${response.statusText}`, response.status, said.code);
}

/** The model's card. Throws ServerError, or TypeError where there is no server. */
export async function model(key) {
  const response = await fetch("/v1/models", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data[0];
}

/** What the server tells of itself. Throws as `model` does. */
export async function props(key) {
  const response = await fetch("/props", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The chunks of a streamed chat completion. Throws ServerError, TypeError, and AbortError on `signal`. */
export async function* chat(body, key, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError("the connection broke before the answer was complete", 0);
    const lines = (buffer + value).split("\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ServerError(chunk.error.message, response.status, chunk.error.code);
      yield chunk;
    }
  }
}

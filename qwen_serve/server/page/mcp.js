// A client of MCP servers (Model Context Protocol, streamable HTTP), which are called through this server's proxy.

const VERSION = "2025-06-18";
const MOST = 100_000; // characters of a result
const PAGES = 20; // of a list of tools

/** The message with this id among those of an answer, as JSON or as events. */
function answered(text, type, id) {
  const messages = type.startsWith("text/event-stream")
    ? text.split(/\r?\n\r?\n/).map((event) => event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n")).filter(Boolean)
    : [text];
  return messages.flatMap((one) => JSON.parse(one)).find((message) => message.id === id && !message.method);
}

function textOf(content) {
  const parts = (Array.isArray(content) ? content : []).map((part) => {
    if (part.type === "text") return part.text;
    if (part.type === "resource" && typeof part.resource?.text === "string") return part.resource.text;
    if (part.type === "resource_link") return `[${part.name ?? "resource"}: ${part.uri}]`;
    return `[${part.type}${part.mimeType ? `, ${part.mimeType}` : ""}: not shown]`;
  });
  return parts.join("\n\n");
}

/** One server: `url`, and `key`, the value of its Authorization header, or "". `serverKey` is this server's own. */
export class McpServer {
  #session = null;
  #version = null;
  #count = 0;

  constructor({ url, key }, serverKey) {
    Object.assign(this, { url, key, serverKey });
  }

  async #post(message, signal) {
    const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream", "Mcp-Url": this.url };
    if (this.serverKey()) headers.Authorization = `Bearer ${this.serverKey()}`;
    if (this.key) headers["Mcp-Authorization"] = this.key;
    if (this.#session) headers["Mcp-Session-Id"] = this.#session;
    if (this.#version) headers["Mcp-Protocol-Version"] = this.#version;
    const response = await fetch("/mcp-proxy", { method: "POST", headers, body: JSON.stringify({ jsonrpc: "2.0", ...message }), signal });
    const text = await response.text();
    if (!response.ok) {
      let said;
      try {
        said = JSON.parse(text).error;
      } catch { /* not this server's */ }
      throw Object.assign(new Error(said?.message ?? `${response.status} ${response.statusText}`), { code: said?.code });
    }
    this.#session = response.headers.get("Mcp-Session-Id") ?? this.#session;
    return { text, type: response.headers.get("Content-Type") ?? "" };
  }

  async #ask(method, params, signal) {
    const id = this.#count += 1;
    const { text, type } = await this.#post({ id, method, params }, signal);
    const answer = text && answered(text, type, id);
    if (!answer) throw new Error(`it did not answer ${method}`);
    if (answer.error) throw new Error(String(answer.error.message ?? "an error without a message"));
    return answer.result;
  }

  async #begin(signal) {
    this.#session = this.#version = null;
    const { protocolVersion } = await this.#ask("initialize", { protocolVersion: VERSION, capabilities: {}, clientInfo: { name: "qwen-serve", version: "1" } }, signal);
    this.#version = protocolVersion;
    await this.#post({ method: "notifications/initialized" }, signal);
  }

  /** Asks within a session, and once more in a new one where the server has forgotten it. */
  async #within(method, params, signal) {
    if (!this.#version) await this.#begin(signal);
    try {
      return await this.#ask(method, params, signal);
    } catch (error) {
      if (error.code !== "mcp_404" || !this.#session) throw error;
      await this.#begin(signal);
      return this.#ask(method, params, signal);
    }
  }

  /** Its tools, as `{ name, description, parameters }`. Throws an Error. */
  async tools(signal) {
    const all = [];
    let cursor;
    for (let page = 0; page < PAGES; page += 1) {
      const { tools, nextCursor } = await this.#within("tools/list", cursor ? { cursor } : {}, signal);
      all.push(...tools.map(({ name, description = "", inputSchema }) =>
        ({ name: String(name), description: String(description), parameters: inputSchema ?? { type: "object", properties: {} } })));
      cursor = nextCursor;
      if (!cursor) break;
    }
    return all;
  }

  /** Calls a tool: `{ failed, text }`. Throws an Error where the server cannot be asked. */
  async call(name, given, signal) {
    const { content, structuredContent, isError } = await this.#within("tools/call", { name, arguments: given }, signal);
    const text = textOf(content) || (structuredContent === undefined ? "" : JSON.stringify(structuredContent));
    return { failed: isError === true, text: text.length > MOST ? `${text.slice(0, MOST)}\n[cut after ${MOST} characters]` : text };
  }
}

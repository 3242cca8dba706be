// One answer: what is asked, and what streams into its message until it is complete or interrupted.

import { seconds } from "./elements.js";
import { PASSED_OVER } from "./agent.js";
import { asText } from "./files.js";
import { keepWithin } from "./pictures.js";
import { SAMPLERS } from "./settings.js";
import { chat } from "./stream.js";

const SAVED_EVERY = 1000; // ms

/** The answers that stream, by conversation's id. */
export const running = new Map();

let leaving = false;
addEventListener("pagehide", () => {
  leaving = true;
  for (const answer of running.values()) answer.save();
});
addEventListener("pageshow", () => { leaving = false; });

/** An answer that called tools, and what they returned. */
const withCalls = ({ content, reasoning, calls }) => [
  {
    role: "assistant",
    content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    tool_calls: calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } })),
  },
  ...calls.map(({ id, result = PASSED_OVER }) => ({ role: "tool", tool_call_id: id, content: result })),
];

/** The request for what follows `messages`, with `tools`. The last message, if it is an answer without calls, is gone on with.
 * Throws SyntaxError. */
export function request(messages, settings, tools = []) {
  const body = { messages: [], chat_template_kwargs: { enable_thinking: settings.think } };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const message of messages) {
    if (message.calls) {
      body.messages.push(...withCalls(message));
      continue;
    }
    const { role, pictures = [], ...said } = message;
    const content = asText(said);
    const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    if (content && parts.length) parts.push({ type: "text", text: content });
    if (content || parts.length) body.messages.push({ role, content: parts.length ? parts : content });
  }
  const begun = messages.at(-1);
  if (begun.role === "assistant" && !begun.calls) {
    if (begun.content) body.messages.pop();
    body.messages.push({ role: "assistant", content: begun.content, reasoning_content: begun.reasoning });
    body.continue_final_message = true;
  }
  for (const { name } of SAMPLERS) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.think && settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.think && settings.thinking_budget !== "") body.thinking_budget = Number(settings.thinking_budget);
  if (settings.schema.trim() && settings.useSchema && begun.role === "user") {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  } else if (tools.length) body.tools = tools;
  return body;
}

const rate = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });

function figuresOf(usage, timings, finish, full) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings?.predicted_per_second) parts.push(`${rate(timings.predicted_per_second)} tok/s`);
  if (timings) parts.push(`first token ${seconds(timings.queue_ms + timings.prompt_ms)}`);
  if (usage) parts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} cached`);
  if (finish === "length") parts.push(full ? "the context is full" : "cut short by max tokens");
  return parts.join(" · ");
}

/** An answer that streams into its message, whatever the page shows meanwhile. */
export class Answer {
  #controller = new AbortController();
  #thinkingSince;
  #calls = []; // not of the message until they are complete

  /** `keep(conversation, messages, live)` saves. */
  constructor(conversation, message, keep) {
    Object.assign(this, { conversation, message, keep, dropped: false });
  }

  get thought() {
    return this.message.thought ?? performance.now() - this.#thinkingSince;
  }

  stop() {
    this.#controller.abort();
  }

  /** Stops it for good: its conversation was deleted. */
  drop() {
    this.dropped = true;
    this.stop();
  }

  save() {
    const live = running.get(this.conversation.id) === this ? this.message.id : undefined;
    if (!this.dropped) this.keep(this.conversation, [this.message], live);
  }

  #add({ reasoning_content: reasoning, content, tool_calls: calls = [] }) {
    const { message } = this;
    for (const { index, id, function: { name = "", arguments: given = "" } = {} } of calls) {
      const call = (this.#calls[index] ??= { id, name: "", arguments: "" });
      call.name += name;
      call.arguments += given;
    }
    if (reasoning) {
      this.#thinkingSince ??= performance.now();
      message.reasoning += reasoning;
    }
    if (content) {
      if (message.reasoning) message.thought ??= this.thought;
      message.content += content;
    }
  }

  /** Streams it from `server`, `{ key, fits, limits }`; `changed` is called at every chunk. Returns `{ failed, model }`: the
   * error that ended it, if one did, and the name of the model that answered. */
  async run(body, { key, fits, limits }, changed) {
    const { message } = this;
    const started = performance.now();
    let usage, timings, finish, failed, model, saved = started;
    for (const name of ["problem", "figures", "full"]) delete message[name];
    message.interrupted = true; // what a reload finds, unless it comes to its end
    if (message.reasoning && !message.content) { // its thoughts go on
      this.#thinkingSince = started - (message.thought ?? 0);
      delete message.thought;
    }
    running.set(this.conversation.id, this);
    changed();
    try {
      if (limits) await keepWithin(body, limits);
      for await (const chunk of chat(body, key, this.#controller.signal)) {
        model = chunk.model;
        usage = chunk.usage ?? usage;
        timings = chunk.timings ?? timings;
        const choice = chunk.choices[0];
        if (!choice) continue;
        finish = choice.finish_reason ?? finish;
        this.#add(choice.delta);
        changed();
        if (performance.now() - saved > SAVED_EVERY) {
          saved = performance.now();
          this.save();
        }
      }
      if (finish === "tool_calls" && this.#calls.length) message.calls = this.#calls;
      if (usage) message.used = usage.total_tokens;
      if (finish === "length" && usage?.total_tokens >= fits) message.full = true;
      message.figures = figuresOf(usage, timings, finish, message.full);
      if (finish !== "length") delete message.interrupted;
    } catch (error) {
      failed = error;
      if (this.#controller.signal.aborted) message.figures = `stopped after ${seconds(performance.now() - started)}`;
      else if (error.code === "context_length_exceeded") {
        message.full = true;
        message.problem = `The context is full: this conversation does not fit into ${fits.toLocaleString("en")} tokens.`;
      } else if (!leaving) message.problem = error instanceof TypeError ? "The server cannot be reached." : error.message;
    }
    if (message.reasoning) message.thought ??= this.thought;
    running.delete(this.conversation.id);
    this.save();
    return { failed, model };
  }
}

// The chat page: conversations, the composer, settings, keys.

import { copy, icon, iconButton, render } from "./markdown.js";
import { conversations, remove, save, set, settings } from "./store.js";
import { chat, model } from "./stream.js";

const $ = (id) => document.getElementById(id);
const input = $("input"), log = $("log"), scroll = $("scroll"), dialog = $("settings");
const fields = dialog.querySelector("form").elements;

let all = []; // conversations, the latest first
let current = null; // the one shown; null for a new one that has no message yet
let running = null; // the AbortController of the answer that streams

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`);

const rate = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });

// --- messages -------------------------------------------------------------------------------------------------

/** A message's element; `update` shows what became of it since. */
class MessageView {
  constructor(message, index) {
    this.message = message;
    this.root = element("article", `message ${message.role}`);
    this.foot = element("div", "foot");
    if (message.role === "user") {
      this.root.append(element("div", "text", message.content), this.foot);
      this.foot.append(iconButton("edit", "Edit and ask again", () => edit(index)));
      return;
    }
    this.thinking = element("details", "thinking");
    this.summary = element("summary");
    this.summaryText = element("span");
    this.summary.append(icon("fold"), this.summaryText);
    this.thought = element("div");
    this.thinking.append(this.summary, this.thought);
    this.content = element("div", "markdown");
    this.waiting = element("span", "waiting");
    this.problem = element("p", "problem");
    this.root.append(this.thinking, this.content, this.waiting, this.problem, this.foot);
    this.update();
  }

  update() {
    const { reasoning, content, thought, problem, json } = this.message;
    const live = this.message.live === true;
    this.thinking.hidden = !reasoning;
    if (reasoning) {
      const time = seconds(thought ?? performance.now() - this.message.thinkingSince);
      this.summaryText.textContent = live && thought === undefined ? `Thinking… ${time}` : `Thought for ${time}`;
      const shown = reasoning.trim();
      if (this.thought.textContent !== shown) this.thought.textContent = shown;
    }
    render(this.content, json && content ? "```json\n" + content + "\n```" : content, live);
    this.waiting.hidden = !live || Boolean(reasoning || content);
    this.problem.hidden = !problem;
    this.problem.textContent = problem ?? "";
    if (!live && !this.foot.hasChildNodes()) this.finish();
  }

  finish() {
    const { content, figures } = this.message;
    if (content) {
      const button = iconButton("copy", "Copy", () => copy(content, button));
      this.foot.append(button);
    }
    if (current.messages.at(-1) === this.message) {
      this.foot.append(iconButton("again", "Answer again", again));
    }
    if (figures) this.foot.append(element("span", "figures", figures));
  }
}

function show() {
  log.replaceChildren(...(current?.messages ?? []).map((message, index) => new MessageView(message, index).root));
  $("empty").hidden = Boolean(current);
  document.title = current ? `${current.title} · qwen-serve` : "qwen-serve";
  list();
  scroll.scrollTop = scroll.scrollHeight;
}

function figuresOf(usage, timings, finish) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings?.predicted_per_second) parts.push(`${rate(timings.predicted_per_second)} tok/s`);
  if (timings) parts.push(`first token ${seconds(timings.queue_ms + timings.prompt_ms)}`);
  if (usage) parts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} cached`);
  if (finish === "length") parts.push("cut short by max tokens");
  return parts.join(" · ");
}

/** The request for the conversation as it is. */
function request() {
  const body = { messages: [], chat_template_kwargs: { enable_thinking: settings.think } };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const { role, content } of current.messages) if (content) body.messages.push({ role, content });
  for (const name of ["temperature", "top_p", "top_k", "max_tokens"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.schema.trim() && settings.useSchema) {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  return body;
}

async function answer() {
  const conversation = current;
  const message = { role: "assistant", content: "", reasoning: "", live: true };
  let body;
  try {
    body = request();
  } catch { // the schema: settings say what is wrong with it
    openSettings(fields.schema);
    return;
  }
  message.json = "response_format" in body;
  conversation.messages.push(message);
  show();
  const view = new MessageView(message, conversation.messages.length - 1);
  log.lastChild.replaceWith(view.root);
  running = new AbortController();
  buttons();

  let usage, timings, finish, due = 0;
  const started = performance.now();
  const draw = () => {
    due = 0;
    const follow = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
    view.update();
    if (follow) scroll.scrollTop = scroll.scrollHeight;
  };
  const soon = () => { due ||= requestAnimationFrame(draw); };
  const clock = setInterval(soon, 100);
  try {
    for await (const chunk of chat(body, settings.key, running.signal)) {
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const { reasoning_content: reasoning, content } = choice.delta;
      if (reasoning) {
        message.thinkingSince ??= performance.now();
        message.reasoning += reasoning;
      }
      if (content) {
        if (message.reasoning) message.thought ??= performance.now() - message.thinkingSince;
        message.content += content;
      }
      soon();
    }
    message.figures = figuresOf(usage, timings, finish);
  } catch (error) {
    if (error.name === "AbortError") message.figures = `stopped after ${seconds(performance.now() - started)}`;
    else message.problem = error instanceof TypeError ? "The server cannot be reached." : error.message;
    if (error.status === 401) {
      $("key-error").textContent = error.message;
      openSettings(fields.key);
    }
  }
  clearInterval(clock);
  cancelAnimationFrame(due);
  if (message.reasoning) message.thought ??= performance.now() - message.thinkingSince;
  delete message.live;
  delete message.thinkingSince;
  running = null;
  draw();
  buttons();
  await keep(conversation);
}

/** Saves a conversation and moves it to the top. */
async function keep(conversation) {
  conversation.changed = Date.now();
  all = [conversation, ...all.filter((other) => other !== conversation)];
  list();
  try {
    await save(conversation);
  } catch (error) {
    $("status").textContent = `This conversation could not be saved: ${error.message}`;
  }
}

async function send() {
  const content = input.value.trim();
  if (!content || running) return;
  input.value = "";
  if (!current) {
    current = { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: content.slice(0, 80), messages: [] };
    set({ current: current.id });
  }
  current.messages.push({ role: "user", content });
  await keep(current);
  await answer();
}

async function again() {
  if (running) return;
  while (current.messages.at(-1)?.role === "assistant") current.messages.pop();
  await answer();
}

/** Takes a question, and all that came after it, back into the composer. */
function edit(index) {
  if (running) return;
  input.value = current.messages[index].content;
  current.messages.length = index;
  keep(current);
  show();
  input.focus();
  buttons();
}

// --- conversations --------------------------------------------------------------------------------------------

function list() {
  $("conversations").replaceChildren(...all.map((conversation) => {
    const row = element("div", `conversation${conversation === current ? " current" : ""}`);
    const open = element("button", "", conversation.title);
    open.addEventListener("click", () => choose(conversation));
    row.append(open, iconButton("bin", "Delete", () => discard(conversation)));
    return row;
  }));
}

function choose(conversation) {
  running?.abort();
  current = conversation;
  set({ current: conversation?.id ?? null });
  document.body.classList.remove("open-side");
  show();
  if (matchMedia("(hover: hover)").matches) input.focus();
}

async function discard(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  all = all.filter((other) => other !== conversation);
  if (conversation === current) choose(null);
  await remove(conversation.id);
  list();
}

// --- settings -------------------------------------------------------------------------------------------------

const NAMED = ["system", "temperature", "top_p", "top_k", "max_tokens", "schema", "key"];

function openSettings(focused) {
  for (const name of NAMED) fields[name].value = settings[name];
  checkSchema();
  if (!dialog.open) dialog.showModal();
  (focused ?? fields.system).focus();
}

function checkSchema() {
  let wrong = "";
  try {
    if (settings.schema.trim()) JSON.parse(settings.schema);
  } catch (error) {
    wrong = error.message;
  }
  $("schema-error").textContent = wrong;
  fields.schema.classList.toggle("bad", Boolean(wrong));
}

dialog.addEventListener("input", ({ target }) => {
  if (target.name === "key") $("key-error").textContent = "";
  if (target.validity.valid) set({ [target.name]: target.value });
  if (target.name === "schema") {
    set({ useSchema: true });
    checkSchema();
  }
  buttons();
});
dialog.addEventListener("click", (event) => { if (event.target === dialog && event.offsetX < 0) dialog.close(); });
dialog.addEventListener("close", () => { identify(); input.focus(); });

const THEMES = { auto: "light", light: "dark", dark: "auto" };

function theme() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  $("theme").title = `Colours: ${settings.theme}`;
}

/** What the buttons show of the state. */
function buttons() {
  $("think").setAttribute("aria-pressed", settings.think);
  $("schema-chip").hidden = !settings.schema.trim();
  $("schema-chip").setAttribute("aria-pressed", settings.useSchema);
  const send = $("send");
  send.disabled = !running && !input.value.trim();
  send.title = running ? "Stop (Esc)" : "Send (Enter)";
  send.setAttribute("aria-label", running ? "Stop" : "Send");
  send.querySelector("use").setAttribute("href", running ? "#i-stop" : "#i-send");
}

// --- keys and clicks ------------------------------------------------------------------------------------------

function toggleSide() {
  document.body.classList.toggle(matchMedia("(max-width: 48rem)").matches ? "open-side" : "narrow-side");
}

function step(by) {
  const index = all.indexOf(current) + by;
  if (all[index]) choose(all[index]);
}

const KEYS = {
  KeyN: () => choose(null),
  KeyT: () => $("think").click(),
  KeyS: () => (dialog.open ? dialog.close() : openSettings()),
  KeyC: toggleSide,
  ArrowUp: () => step(-1),
  ArrowDown: () => step(1),
};

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !dialog.open) running.abort();
  else if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code]) {
    event.preventDefault();
    KEYS[event.code]();
  }
});

input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !event.altKey && !input.value && current?.messages.length) {
    event.preventDefault();
    edit(current.messages.findLastIndex((message) => message.role === "user"));
  }
});
input.addEventListener("input", buttons);
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send();
});
$("new").addEventListener("click", () => choose(null));
$("menu").addEventListener("click", toggleSide);
$("shade").addEventListener("click", toggleSide);
$("tune").addEventListener("click", () => openSettings());
$("theme").addEventListener("click", () => { set({ theme: THEMES[settings.theme] }); theme(); });
$("think").addEventListener("click", () => { set({ think: !settings.think }); buttons(); });
$("schema-chip").addEventListener("click", () => { set({ useSchema: !settings.useSchema }); buttons(); });

// --- the server -----------------------------------------------------------------------------------------------

let retry = 0;

/** Shows the model's name; asks again while it is loading. */
async function identify() {
  clearTimeout(retry);
  const status = $("status");
  try {
    const card = await model(settings.key);
    $("model").textContent = card.id;
    $("about").textContent = `${card.id} · up to ${card.max_model_len.toLocaleString("en")} tokens`;
    status.textContent = "";
  } catch (error) {
    status.textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    if (error.status === 401) {
      $("key-error").textContent = error.message;
      if (!dialog.open) openSettings(fields.key);
    } else retry = setTimeout(identify, 1000);
  }
}

theme();
buttons();
identify();
all = await conversations();
current = all.find((conversation) => conversation.id === settings.current) ?? null;
show();

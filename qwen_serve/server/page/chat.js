// The chat page: which conversation is shown, what is asked, keys and clicks.

import { Answer, request, running } from "./answer.js";
import { Conversation } from "./conversation.js";
import { draftOf, keepDraft, keepShown, shownId } from "./drafts.js";
import { isCalling, settle, stopCalls } from "./agent.js";
import { addressed, asked, showAddress, whenAddressed } from "./address.js";
import { $, download, element, iconButton, inItsDirection, notify } from "./elements.js";
import { fromText, toJson, toMarkdown } from "./exchange.js";
import { MessageView } from "./message.js";
import { askForKey, closeSettings, effective, fields, openSettings, set, settings, settingsAreOpen, showDefaults, showFacts, showOwn, told, watchSettings } from "./settings.js";
import { conversations, conversationsWith, messagesOf, remove, save, whenBlocked, whenChanged } from "./store.js";
import { attached, example, readAll, watchFiles } from "./pictures.js";
import { model, props } from "./stream.js";
import { allow, count, offered, watchTools } from "./tools.js";

const input = $("input"), log = $("log"), scroll = $("scroll"), search = $("search");

$("unloaded").remove();
let all = []; // conversations, or their records, the latest first
let current = null; // the one shown; null for a new one that has no message yet
let fresh = {}; // settings of its own that a new one will have
let draft = draftOf(null); // what is typed for it
let seeing = false; // whether the model sees pictures
let fits = 0; // tokens of a conversation
let limits = null; // of a request: `{ body_bytes, images }`
let reading = Promise.resolve(); // of files that were given, in their order
let unread = 0; // how often files were given that are not all read
let found = null; // ids of the conversations in which what is searched for was found; null where nothing is
let renaming = null; // the id of the conversation whose title is being typed
const opened = new Map(); // conversations of which this tab has the messages, by id
const elsewhere = new Map(); // when another tab last said that a message grows there, by the message's id

// --- messages -------------------------------------------------------------------------------------------------

const views = new WeakMap();
const actions = { begin: () => choose(null), decide, edit, again, resume, takeOut, turn };

function viewOf(message) {
  if (!views.has(message)) views.set(message, new MessageView(message, actions));
  return views.get(message);
}

const LIVE_FOR = 5000; // ms

function update(message) {
  const answer = running.get(message.conversation);
  const here = answer?.message === message;
  const live = here || Date.now() - elsewhere.get(message.id) < LIVE_FOR;
  viewOf(message).update(live, here ? answer.thought : message.thought);
  return live;
}

const atEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;

/** Shows the branch of the conversation; at its end, unless the reader looks elsewhere. */
function show(end = false) {
  const branch = current?.branch ?? [];
  const top = scroll.scrollTop;
  const shown = branch.map((message) => viewOf(message).root);
  if (shown.length !== log.children.length || shown.some((root, index) => root !== log.children[index])) {
    log.replaceChildren(...shown);
  }
  let later = false; // behind the message that is edited
  for (const message of branch) {
    const live = update(message);
    viewOf(message).updateFoot(current.siblings(message), live, message === branch.at(-1));
    later ||= message.id === draft.editing;
    viewOf(message).root.classList.toggle("later", later);
  }
  $("empty").hidden = Boolean(current);
  giveOwn();
  showUse();
  showTold();
  showAddress(current);
  document.title = current ? `${current.title} · qwen-serve` : "qwen-serve";
  scroll.scrollTop = end ? scroll.scrollHeight : top;
  list();
  buttons();
}

/** Says the conversation's system prompt and sampling on it. */
function showTold() {
  const { system, numbers } = told();
  $("own").hidden = !(system || numbers);
  $("own").replaceChildren(...[system && inItsDirection(element("span", "system", system)), numbers && element("span", "", numbers)].filter(Boolean));
}

/** Gives the settings what this conversation has of its own. */
function giveOwn() {
  const conversation = current;
  showOwn(conversation ? conversation.own : fresh, () => { if (conversation) keep(conversation, []); });
}

/** Says how much of the context the conversation takes. */
function showUse() {
  const used = current?.branch.findLast((message) => message.used)?.used;
  $("context").textContent = used && fits ? `${used.toLocaleString("en")} of ${fits.toLocaleString("en")} tokens` : "";
  $("use").hidden = !(used && fits);
  Object.assign($("use"), { max: fits || 1, high: 0.8 * fits, optimum: 0, value: used ?? 0, title: $("context").textContent });
}

// --- asking ---------------------------------------------------------------------------------------------------

const busy = () => running.has(current?.id) || isCalling(current?.id);

function stop() {
  running.get(current?.id)?.stop();
  stopCalls(current?.id);
}

/** Streams an answer into `message`, behind what `path` says. */
async function stream(conversation, message, body) {
  const answer = new Answer(conversation, message, keep);
  const { root } = viewOf(message);
  let due = 0;
  const draw = () => {
    due = 0;
    if (!root.isConnected) return; // it goes on where nobody looks
    const follow = atEnd();
    update(message);
    if (follow) scroll.scrollTop = scroll.scrollHeight;
  };
  const soon = () => { due ||= requestAnimationFrame(draw); };
  const clock = setInterval(soon, 100);
  const done = answer.run(body, { key: settings.key, fits, limits }, soon);
  show(true);
  const { failed, model } = await done;
  clearInterval(clock);
  cancelAnimationFrame(due);
  draw();
  if (current === conversation) show(atEnd()); // what it calls is shown below it
  else list();
  if (failed?.status === 401) askForKey(failed.message);
  else if (failed || model !== $("model").textContent) identify(); // the server may have been started anew
}

/** The body of a request; undefined where the schema is wrong, which the settings then say. */
async function bodyFor(path) {
  const values = effective();
  const tools = await offered();
  try {
    return request(path, values, tools);
  } catch {
    openSettings(fields.schema);
    return undefined;
  }
}

async function answer(question, conversation = current) {
  const body = await bodyFor(conversation.upTo(question.id));
  if (!body) return show();
  const json = "response_format" in body;
  await stream(conversation, conversation.add(question.id, { role: "assistant", content: "", reasoning: "", json }), body);
}

/** Runs a call of an answer, or not, and lets the model go on. */
function decide(message, call, allowed) {
  const conversation = current;
  return settle(conversation, message, call, allowed, {
    keep,
    show: () => { if (conversation === current) show(atEnd()); else list(); },
    goOn: () => answer(message, conversation),
  });
}

async function send() {
  const content = input.value.trim();
  const { given, before: typed, kept } = draft;
  if (!(content || given.length) || busy() || unread) return;
  const edited = current?.messages.get(draft.editing);
  if (edited?.role === "assistant") return rewrite(edited, content);
  keepDraft(current, null);
  if (!current) {
    current = Conversation.begin(content || given.find(({ name }) => name)?.name || "Picture", fresh);
    opened.set(current.id, current);
    keepShown(current);
  }
  type({ text: typed, given: kept });
  keepDraft(current, draft);
  const [files, pictures] = [given.filter(({ name }) => name), given.filter(({ name }) => !name)];
  const shown = { ...(pictures.length ? { pictures } : {}), ...(files.length ? { files } : {}) };
  const question = current.add(edited ? edited.parent : current.leaf, { role: "user", content, ...shown });
  keep(current, [question]);
  await answer(question);
}

/** Adds what was typed as another version of an answer. */
function rewrite(answer, content) {
  type({ text: draft.before, given: draft.kept });
  keepDraft(current, draft);
  const { reasoning, thought } = answer;
  const message = current.add(answer.parent, { role: "assistant", content, reasoning, ...(thought ? { thought } : {}), figures: "edited" });
  keep(current, [message]);
  show();
}

/** Takes one message out of its conversation, until "Undo". */
async function takeOut(message) {
  const conversation = current;
  if (busy()) return;
  if (conversation.messages.size === 1) return discard(conversation);
  if (draft.editing === message.id) cancelEdit();
  const after = conversation.takeOut(message);
  await keep(conversation, after, undefined, [message.id]);
  show();
  notify("Taken out", "Undo", async () => {
    conversation.putBack(message, after);
    await keep(conversation, [message, ...after]);
    show();
  }).focus();
}

/** Asks a question again, or that of an answer: one more answer in its place. */
async function again(message) {
  if (busy()) return;
  const question = message.role === "user" ? message : current.messages.get(message.parent);
  if (question) await answer(question);
}

/** Goes on with an answer that was interrupted. */
async function resume(message) {
  if (busy()) return;
  const conversation = current;
  if (message.calls) return answer(message);
  await stream(conversation, message, await bodyFor(conversation.upTo(message.id)));
}

/** Shows another version of a message, and what followed it. */
function turn(message) {
  const label = document.activeElement?.ariaLabel;
  current.show(message);
  keep(current, []);
  if (draft.editing && !current.branch.some(({ id }) => id === draft.editing)) cancelEdit();
  show();
  viewOf(message).focus(label);
}

// --- the composer ---------------------------------------------------------------------------------------------

/** Puts a draft into the composer. */
function type(changes) {
  draft = { text: "", given: [], editing: null, before: "", kept: [], ...changes };
  input.value = draft.text;
  $("editing").hidden = !draft.editing;
  const answer = current?.messages.get(draft.editing)?.role === "assistant";
  $("editing-what").textContent = `What you ${answer ? "save" : "send"} becomes another version; this one is kept.`;
  showAttached();
}

function showAttached() {
  $("pictures").hidden = !draft.given.length;
  $("pictures").replaceChildren(...attached(draft.given, (index) => {
    attach(draft, current, draft.given.toSpliced(index, 1));
    input.focus();
  }));
  buttons();
}

/** Makes these the pictures and files of a conversation's draft. */
function attach(to, conversation, given) {
  to.given = given;
  keepDraft(conversation, to);
  if (to === draft) showAttached();
}

/** Adds files to what is typed, behind those given before. Nothing is sent until all are read. */
async function take(files) {
  const [to, conversation] = [draft, current];
  unread += 1;
  buttons();
  await (reading = reading.then(() =>
    readAll(files, () => to.given.length, (one) => attach(to, conversation, [...to.given, one]))));
  unread -= 1;
  buttons();
  input.focus();
}

/** Takes a message into the composer; it stays where it is, and what is sent becomes another version of it. */
function edit(message) {
  const before = draft.editing ? draft.before : input.value;
  const kept = draft.editing ? draft.kept : draft.given;
  const given = [...(message.pictures ?? []), ...(message.files ?? [])];
  type({ text: message.content, given, editing: message.id, before, kept });
  keepDraft(current, draft);
  show();
  input.focus();
}

function cancelEdit() {
  type({ text: draft.before, given: draft.kept });
  keepDraft(current, draft);
  show();
  input.focus();
}

// --- keeping --------------------------------------------------------------------------------------------------

/** Saves messages of a conversation; those that could not be saved before, too. */
async function keep(conversation, messages, live, gone) {
  all = [conversation, ...all.filter(({ id }) => id !== conversation.id)].sort((a, b) => b.changed - a.changed);
  list();
  const whole = conversation.unsaved || conversation.deleted;
  try {
    await save(conversation.record, whole ? [...conversation.messages.values()] : messages, live, gone);
    if (!whole) return;
    conversation.unsaved = conversation.deleted = false;
    notify("");
  } catch (error) {
    conversation.unsaved = true;
    const full = error?.name === "QuotaExceededError";
    const why = full ? "this browser has no room left for it. Delete others, or save it as a file" : error?.message;
    notify(`This conversation is not saved: ${why}.`, "Save as a file", () => chooseFile(conversation));
  }
}

async function load(record) {
  if (!opened.has(record.id)) {
    const messages = await messagesOf(record.id);
    if (!opened.has(record.id)) opened.set(record.id, new Conversation(record, messages));
  }
  return opened.get(record.id);
}

let choosing;

async function choose(record) {
  choosing = record;
  let conversation = null;
  try {
    conversation = record && await load(record);
  } catch (error) {
    notify(`“${record.title}” cannot be read: ${error?.message}.`);
    return;
  }
  if (choosing !== record) return; // another was chosen meanwhile
  current = conversation;
  fresh = {};
  keepShown(current);
  type(draftOf(current));
  document.body.classList.remove("open-side");
  show(true);
  if (matchMedia("(hover: hover)").matches) input.focus();
}

async function discard(record) {
  const conversation = await load(record);
  running.get(record.id)?.drop();
  opened.delete(record.id);
  all = all.filter(({ id }) => id !== record.id);
  if (current === conversation) await choose(null);
  list();
  notify(`Deleted “${record.title}”`, "Undo", () => restore(conversation)).focus();
  try {
    await remove(record.id);
  } catch (error) {
    notify(`“${record.title}” could not be deleted: ${error?.message}.`);
    await refresh();
  }
  for (const other of opened.values()) if (other.unsaved) await keep(other, []); // there may be room now
}

async function restore(conversation) {
  conversation.deleted = true;
  opened.set(conversation.id, conversation);
  await keep(conversation, []);
  await choose(conversation);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
const downloadJson = (name, all) => download(`${name}.json`, toJson(all), "application/json");

/** Asks as what a conversation is to be saved. */
async function chooseFile(record) {
  const conversation = await load(record);
  const name = fileName(conversation.title);
  $("saving-what").textContent = conversation.title;
  $("save-markdown").onclick = () => { download(`${name}.md`, toMarkdown(conversation)); $("saving").close(); };
  $("save-json").onclick = () => { downloadJson(name, [conversation]); $("saving").close(); };
  $("saving").showModal();
}

async function exportAll() {
  downloadJson("conversations", await Promise.all(all.map(load)));
}

async function importFiles(files) {
  let count = 0, last = null;
  for (const file of files) {
    try {
      for (const conversation of fromText(await file.text())) {
        conversation.unsaved = true; // all its messages are to be written
        opened.set(conversation.id, conversation);
        await keep(conversation, []);
        count += 1;
        last = conversation;
      }
    } catch (error) {
      notify(`“${file.name}” cannot be read: ${error.message}.`);
      return;
    }
  }
  if (last) await choose(last);
  if (!last?.unsaved) notify(count === 1 ? `Imported “${last.title}”` : `Imported ${count} conversations`);
}

/** Gives a conversation another title; with none, it stays as it was. */
async function rename(record, title) {
  renaming = null;
  const conversation = await load(record);
  if (title.trim() && title.trim() !== conversation.title) {
    conversation.title = title.trim().slice(0, 200);
    await keep(conversation, []);
    if (conversation === current) show();
  }
  list();
}

/** The list as the store has it, and what the store does not have yet. */
async function refresh() {
  const stored = await conversations();
  for (const { id, title, own = {} } of stored) {
    const known = opened.get(id);
    if (known && !known.unsaved) Object.assign(known, { title, own }); // another tab may have changed it
  }
  const others = [...opened.values()].filter((one) => !one.deleted && !stored.some(({ id }) => id === one.id));
  all = [...others, ...stored].sort((a, b) => b.changed - a.changed);
  list();
}

/** What another tab did. */
async function hear({ saved, removed, messages, live, gone = [] }) {
  const known = opened.get(saved ?? removed);
  if (removed && known) {
    running.get(removed)?.drop();
    known.deleted = true;
    if (known !== current) opened.delete(removed);
    else notify("This conversation was deleted in another tab.", "Keep it", () => restore(known));
  }
  if (saved && known) {
    const stored = await messagesOf(saved);
    known.merge(stored.filter(({ id }) => messages.includes(id)));
    known.deleted = false;
    for (const id of gone) if (known.messages.has(id)) known.takeOut(known.messages.get(id));
    for (const id of messages) elsewhere.delete(id);
    if (live) {
      elsewhere.set(live, Date.now());
      setTimeout(() => { if (known === current) show(); }, LIVE_FOR + 100); // that tab may have been closed
    }
  }
  await refresh();
  if (known && known === current) show(atEnd());
}

// --- the list of conversations --------------------------------------------------------------------------------

let listed = "";

const listedOnes = () => all.filter(({ id, title }) => !found || found.has(id) || matches(title));

function list() {
  const shownOnes = listedOnes();
  const state = JSON.stringify([shownOnes.map(({ id, title }) => [id, title, running.has(id)]), current?.id, renaming]);
  if (state === listed) return; // not to take the keyboard's place away
  listed = state;
  $("conversations").replaceChildren(...shownOnes.map((record) => {
    const shown = record.id === current?.id;
    const row = element("div", `conversation${shown ? " current" : ""}`);
    const open = inItsDirection(element("button", "", record.title));
    if (shown) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => choose(record));
    row.append(renaming === record.id ? titleInput(record) : open);
    if (running.has(record.id)) {
      const mark = element("span", "waiting");
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", "an answer is being written");
      row.append(mark);
    }
    if (renaming !== record.id) row.append(iconButton("edit", "Rename", () => { renaming = record.id; list(); }));
    row.append(iconButton("file", "Save as a file", () => chooseFile(record)), iconButton("bin", "Delete", () => discard(record)));
    return row;
  }));
  const field = renaming && $("conversations").querySelector("input");
  field?.select();
}

/** What a title is typed in, in the place of a conversation's button. */
function titleInput(record) {
  const field = Object.assign(element("input"), { value: record.title, ariaLabel: "Title", maxLength: 200, dir: "auto" });
  let done = false;
  const end = (title) => {
    if (done) return;
    done = true;
    rename(record, title).then(() => $("conversations").querySelector(".current > button")?.focus());
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter") end(field.value);
    else if (event.key === "Escape") end("");
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  field.addEventListener("blur", () => end(field.value));
  return field;
}

const words = () => search.value.trim().toLowerCase();
const matches = (text) => text.toLowerCase().includes(words());

/** Lists the conversations that have what is searched for, in their titles or messages. */
async function look() {
  const wanted = words();
  const ids = wanted && await conversationsWith(({ content, files = [] }) => matches(content) || files.some(({ text }) => matches(text)));
  if (words() !== wanted) return; // more was typed meanwhile
  found = wanted ? ids : null;
  list();
  const count = listedOnes().length;
  $("found").textContent = wanted ? `${count || "Nothing"} found` : "";
}

// --- buttons --------------------------------------------------------------------------------------------------

const THEMES = { auto: "light", light: "dark", dark: "auto" };

/** What the buttons show of the state. */
function buttons() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  $("theme").title = `Colours: ${settings.theme}`;
  $("think").setAttribute("aria-pressed", settings.think);
  $("attach").title = `Add ${seeing ? "pictures and " : ""}text files; or paste or drop them`;
  $("example").hidden = !seeing;
  $("schema-chip").hidden = !settings.schema.trim();
  $("schema-chip").setAttribute("aria-pressed", settings.useSchema);
  $("tools-chip").hidden = !count();
  $("tools-chip").setAttribute("aria-pressed", settings.useTools);
  const send = $("send");
  send.disabled = !busy() && (unread > 0 || !(input.value.trim() || draft.given.length));
  send.title = busy() ? "Stop (Esc)" : "Send (Enter)";
  send.setAttribute("aria-label", busy() ? "Stop" : "Send");
  send.querySelector("use").setAttribute("href", busy() ? "#i-stop" : "#i-send");
  log.classList.toggle("busy", busy());
  showTold();
}

// --- keys and clicks ------------------------------------------------------------------------------------------

function toggleSide() {
  document.body.classList.toggle(matchMedia("(max-width: 48rem)").matches ? "open-side" : "narrow-side");
}

function findIt() {
  if (!$("side").checkVisibility({ visibilityProperty: true })) toggleSide();
  search.select();
}

function step(by) {
  const ones = listedOnes();
  const next = ones[ones.findIndex(({ id }) => id === current?.id) + by];
  if (next) choose(next);
}

const KEYS = {
  KeyN: () => choose(null),
  KeyT: () => $("think").click(),
  KeyS: () => (settingsAreOpen() ? closeSettings() : openSettings()),
  KeyC: toggleSide,
  KeyK: findIt,
  ArrowUp: () => step(-1),
  ArrowDown: () => step(1),
};

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (document.body.classList.contains("open-side")) toggleSide();
    else if (draft.editing) cancelEdit();
    else stop();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code]) {
    event.preventDefault();
    KEYS[event.code]();
  }
});

const touch = matchMedia("(pointer: coarse) and (hover: none)"); // its keyboard has no Shift+Enter

input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !touch.matches && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !event.altKey && !input.value && !draft.editing) {
    const last = current?.branch.findLast(({ role }) => role === "user");
    if (!last) return;
    event.preventDefault();
    edit(last);
  }
});
input.addEventListener("input", () => {
  draft.text = input.value;
  keepDraft(current, draft);
  buttons();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy()) stop();
  else send();
});
search.addEventListener("input", look);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && listedOnes().length) choose(listedOnes()[0]);
  else if (event.key === "Escape" && search.value) search.value = "";
  else return;
  look();
  event.preventDefault();
  event.stopPropagation();
});
$("export").addEventListener("click", exportAll);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async ({ target }) => {
  const files = [...target.files];
  target.value = ""; // the same may be chosen again
  await importFiles(files);
});
$("new").addEventListener("click", () => choose(null));
$("end").addEventListener("click", () => { scroll.scrollTop = scroll.scrollHeight; });
scroll.addEventListener("scroll", () => { $("end").hidden = atEnd(); });
$("menu").addEventListener("click", toggleSide);
$("shade").addEventListener("click", toggleSide);
$("tune").addEventListener("click", () => openSettings());
$("own").addEventListener("click", () => openSettings());
$("theme").addEventListener("click", () => { set({ theme: THEMES[settings.theme] }); buttons(); });
$("think").addEventListener("click", () => { set({ think: !settings.think }); buttons(); });
$("schema-chip").addEventListener("click", () => { set({ useSchema: !settings.useSchema }); buttons(); });
$("tools-chip").addEventListener("click", () => { set({ useTools: !settings.useTools }); buttons(); });
$("cancel-edit").addEventListener("click", cancelEdit);
$("notice-close").addEventListener("click", () => notify(""));
addEventListener("beforeunload", (event) => {
  if ([...opened.values()].some(({ unsaved }) => unsaved)) event.preventDefault();
});

// --- the server -----------------------------------------------------------------------------------------------

let retry = 0;

function factsOf({ id, max_model_len: context, meta }, { total_slots: slots, modalities, build_info: build }) {
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
  const [giga, mega] = [1e9, 1e6];
  const parameters = meta.n_params < giga ? `${number(meta.n_params / mega)} million` : `${number(meta.n_params / giga)} billion`;
  return [
    ["Model", id],
    ["Kind", meta.description],
    ["Parameters", parameters],
    ["Size", `${number(meta.size / (meta.size < 2 ** 30 ? 2 ** 20 : 2 ** 30))} ${meta.size < 2 ** 30 ? "MiB" : "GiB"}`],
    ["Context", `${number(context)} of ${number(meta.n_ctx_train)} tokens`],
    ["At once", `${slots} answers`],
    ["Sees pictures", modalities.vision ? "yes" : "no"],
    ["Server", build],
  ];
}

/** Shows the model's name; asks again while it is loading. */
async function identify() {
  clearTimeout(retry);
  const status = $("status");
  try {
    const card = await model(settings.key);
    const about = await props(settings.key);
    seeing = about.modalities.vision;
    fits = card.max_model_len;
    limits = about.limits;
    allow(about.mcp_origins);
    showDefaults(about.default_generation_settings);
    showFacts(factsOf(card, about));
    $("model").textContent = card.id;
    $("about").textContent = `${card.id} · up to ${card.max_model_len.toLocaleString("en")} tokens`;
    status.textContent = "";
    showUse();
    buttons();
  } catch (error) {
    status.textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    if (error.status === 401) askForKey(error.message);
    else retry = setTimeout(identify, 1000);
  }
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) identify(); });
watchSettings(buttons, () => { identify(); input.focus(); });
watchFiles(() => seeing, take);
$("example").addEventListener("click", async () => {
  const { file, question } = await example();
  set({ think: false }); // the bundled model answers about pictures without thoughts alone
  input.value = question;
  input.dispatchEvent(new Event("input"));
  await take([file]);
});
watchTools(buttons);
whenAddressed((id) => {
  if (id !== (current?.id ?? null)) choose(all.find((one) => one.id === id) ?? null);
});
whenChanged(hear);
whenBlocked(() => notify("Another tab has an older version of this page. Close it, and your conversations are here."));
buttons();
const identified = identify();
try {
  await refresh();
  const question = asked();
  if (question) {
    await identified;
    await choose(null);
    type({ text: question });
    await send();
  } else if (addressed() || (!current && !input.value && !draft.given.length && !unread)) {
    await choose(all.find(({ id }) => id === (addressed() ?? shownId())) ?? null);
  }
} catch (error) {
  notify(`This browser keeps no conversations: ${error?.message}.`);
}

// The chat page: which conversation is shown, what is asked, keys and clicks.

import { Answer, request, running } from "./answer.js";
import { Conversation } from "./conversation.js";
import { draftOf, keepDraft, keepShown, shownId } from "./drafts.js";
import { $, download, element, iconButton, notify } from "./elements.js";
import { MessageView } from "./message.js";
import { askForKey, closeSettings, fields, openSettings, set, settings, settingsAreOpen, watchSettings } from "./settings.js";
import { conversations, messagesOf, remove, save, whenBlocked, whenChanged } from "./store.js";
import { attached, readAll, watchPictures } from "./pictures.js";
import { model, sees } from "./stream.js";

const input = $("input"), log = $("log"), scroll = $("scroll");

let all = []; // conversations, or their records, the latest first
let current = null; // the one shown; null for a new one that has no message yet
let draft = draftOf(null); // what is typed for it
let seeing = false; // whether the model sees pictures
let reading = Promise.resolve(); // of pictures that were given, in their order
let unread = 0; // how often pictures were given that are not all read
const opened = new Map(); // conversations of which this tab has the messages, by id
const elsewhere = new Map(); // when another tab last said that a message grows there, by the message's id

// --- messages -------------------------------------------------------------------------------------------------

const views = new WeakMap();
const actions = { edit, again, resume, turn };

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
  document.title = current ? `${current.title} · qwen-serve` : "qwen-serve";
  scroll.scrollTop = end ? scroll.scrollHeight : top;
  list();
  buttons();
}

// --- asking ---------------------------------------------------------------------------------------------------

const busy = () => running.has(current?.id);

/** Streams an answer into `message`, behind what `path` says. */
async function stream(conversation, message, body) {
  const answer = new Answer(conversation, message, keep);
  const { root } = viewOf(message);
  let due = 0;
  const draw = () => {
    due = 0;
    if (!root.isConnected) return; // it goes on where nobody looks
    const follow = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
    update(message);
    if (follow) scroll.scrollTop = scroll.scrollHeight;
  };
  const soon = () => { due ||= requestAnimationFrame(draw); };
  const clock = setInterval(soon, 100);
  const done = answer.run(body, settings.key, soon);
  show(true);
  const failed = await done;
  clearInterval(clock);
  cancelAnimationFrame(due);
  draw();
  if (current === conversation) show();
  else list();
  if (failed?.status === 401) askForKey(failed.message);
}

/** The body of a request; undefined where the schema is wrong, which the settings then say. */
function bodyFor(path) {
  try {
    return request(path, settings);
  } catch {
    openSettings(fields.schema);
    return undefined;
  }
}

async function answer(question) {
  const body = bodyFor(current.upTo(question.id));
  if (!body) return show();
  const json = "response_format" in body;
  await stream(current, current.add(question.id, { role: "assistant", content: "", reasoning: "", json }), body);
}

async function send() {
  const content = input.value.trim();
  const { pictures, before: typed, kept } = draft;
  if (!(content || pictures.length) || busy() || unread) return;
  const edited = current?.messages.get(draft.editing);
  keepDraft(current, null);
  if (!current) {
    current = Conversation.begin(content);
    opened.set(current.id, current);
    keepShown(current);
  }
  type({ text: typed, pictures: kept });
  keepDraft(current, draft);
  const shown = pictures.length ? { pictures } : {};
  const question = current.add(edited ? edited.parent : current.leaf, { role: "user", content, ...shown });
  keep(current, [question]);
  await answer(question);
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
  await stream(current, message, bodyFor(current.upTo(message.id)));
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
  draft = { text: "", pictures: [], editing: null, before: "", kept: [], ...changes };
  input.value = draft.text;
  $("editing").hidden = !draft.editing;
  showAttached();
}

function showAttached() {
  $("pictures").hidden = !draft.pictures.length;
  $("pictures").replaceChildren(...attached(draft.pictures, (index) => {
    attach(draft, current, draft.pictures.toSpliced(index, 1));
    input.focus();
  }));
  buttons();
}

/** Makes these the pictures of a conversation's draft. */
function attach(to, conversation, pictures) {
  to.pictures = pictures;
  keepDraft(conversation, to);
  if (to === draft) showAttached();
}

/** Adds pictures' files to what is typed, behind those given before. Nothing is sent until all are read. */
async function take(files) {
  const [to, conversation] = [draft, current];
  unread += 1;
  buttons();
  await (reading = reading.then(() =>
    readAll(files, () => to.pictures.length, (url) => attach(to, conversation, [...to.pictures, url]))));
  unread -= 1;
  buttons();
  input.focus();
}

/** Takes a question into the composer; it stays where it is, and what is sent becomes another version of it. */
function edit(message) {
  const before = draft.editing ? draft.before : input.value;
  const kept = draft.editing ? draft.kept : draft.pictures;
  type({ text: message.content, pictures: message.pictures ?? [], editing: message.id, before, kept });
  keepDraft(current, draft);
  show();
  input.focus();
}

function cancelEdit() {
  type({ text: draft.before, pictures: draft.kept });
  keepDraft(current, draft);
  show();
  input.focus();
}

// --- keeping --------------------------------------------------------------------------------------------------

/** Saves messages of a conversation; those that could not be saved before, too. */
async function keep(conversation, messages, live) {
  all = [conversation, ...all.filter(({ id }) => id !== conversation.id)].sort((a, b) => b.changed - a.changed);
  list();
  const whole = conversation.unsaved || conversation.deleted;
  try {
    await save(conversation.record, whole ? [...conversation.messages.values()] : messages, live);
    if (!whole) return;
    conversation.unsaved = conversation.deleted = false;
    notify("");
  } catch (error) {
    conversation.unsaved = true;
    const full = error?.name === "QuotaExceededError";
    const why = full ? "this browser has no room left for it. Delete others, or save it as a file" : error?.message;
    notify(`This conversation is not saved: ${why}.`, "Save as a file", () => exportFile(conversation));
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

async function exportFile(record) {
  const conversation = await load(record);
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);
  download(`${name || "conversation"}.md`, conversation.markdown);
}

/** The list as the store has it, and what the store does not have yet. */
async function refresh() {
  const stored = await conversations();
  const others = [...opened.values()].filter((one) => !one.deleted && !stored.some(({ id }) => id === one.id));
  all = [...others, ...stored].sort((a, b) => b.changed - a.changed);
  list();
}

/** What another tab did. */
async function hear({ saved, removed, messages, live }) {
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
    for (const id of messages) elsewhere.delete(id);
    if (live) {
      elsewhere.set(live, Date.now());
      setTimeout(() => { if (known === current) show(); }, LIVE_FOR + 100); // that tab may have been closed
    }
  }
  await refresh();
  if (known && known === current) show(scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60);
}

// --- the list of conversations --------------------------------------------------------------------------------

let listed = "";

function list() {
  const state = JSON.stringify([all.map(({ id, title }) => [id, title, running.has(id)]), current?.id]);
  if (state === listed) return; // not to take the keyboard's place away
  listed = state;
  $("conversations").replaceChildren(...all.map((record) => {
    const shown = record.id === current?.id;
    const row = element("div", `conversation${shown ? " current" : ""}`);
    const open = element("button", "", record.title);
    if (shown) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => choose(record));
    row.append(open);
    if (running.has(record.id)) {
      const mark = element("span", "waiting");
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", "an answer is being written");
      row.append(mark);
    }
    row.append(iconButton("file", "Save as a file", () => exportFile(record)), iconButton("bin", "Delete", () => discard(record)));
    return row;
  }));
}

// --- buttons --------------------------------------------------------------------------------------------------

const THEMES = { auto: "light", light: "dark", dark: "auto" };

/** What the buttons show of the state. */
function buttons() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  $("theme").title = `Colours: ${settings.theme}`;
  $("think").setAttribute("aria-pressed", settings.think);
  $("attach").hidden = !seeing;
  $("schema-chip").hidden = !settings.schema.trim();
  $("schema-chip").setAttribute("aria-pressed", settings.useSchema);
  const send = $("send");
  send.disabled = !busy() && (unread > 0 || !(input.value.trim() || draft.pictures.length));
  send.title = busy() ? "Stop (Esc)" : "Send (Enter)";
  send.setAttribute("aria-label", busy() ? "Stop" : "Send");
  send.querySelector("use").setAttribute("href", busy() ? "#i-stop" : "#i-send");
  log.classList.toggle("busy", busy());
}

// --- keys and clicks ------------------------------------------------------------------------------------------

function toggleSide() {
  document.body.classList.toggle(matchMedia("(max-width: 48rem)").matches ? "open-side" : "narrow-side");
}

function step(by) {
  const next = all[all.findIndex(({ id }) => id === current?.id) + by];
  if (next) choose(next);
}

const KEYS = {
  KeyN: () => choose(null),
  KeyT: () => $("think").click(),
  KeyS: () => (settingsAreOpen() ? closeSettings() : openSettings()),
  KeyC: toggleSide,
  ArrowUp: () => step(-1),
  ArrowDown: () => step(1),
};

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !settingsAreOpen()) {
    if (draft.editing) cancelEdit();
    else running.get(current?.id)?.stop();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code]) {
    event.preventDefault();
    KEYS[event.code]();
  }
});

input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
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
  if (busy()) running.get(current.id).stop();
  else send();
});
$("new").addEventListener("click", () => choose(null));
$("menu").addEventListener("click", toggleSide);
$("shade").addEventListener("click", toggleSide);
$("tune").addEventListener("click", () => openSettings());
$("theme").addEventListener("click", () => { set({ theme: THEMES[settings.theme] }); buttons(); });
$("think").addEventListener("click", () => { set({ think: !settings.think }); buttons(); });
$("schema-chip").addEventListener("click", () => { set({ useSchema: !settings.useSchema }); buttons(); });
$("cancel-edit").addEventListener("click", cancelEdit);
$("notice-close").addEventListener("click", () => notify(""));
addEventListener("beforeunload", (event) => {
  if ([...opened.values()].some(({ unsaved }) => unsaved)) event.preventDefault();
});

// --- the server -----------------------------------------------------------------------------------------------

let retry = 0;

/** Shows the model's name; asks again while it is loading. */
async function identify() {
  clearTimeout(retry);
  const status = $("status");
  try {
    const card = await model(settings.key);
    seeing = await sees(settings.key);
    $("model").textContent = card.id;
    $("about").textContent = `${card.id} · up to ${card.max_model_len.toLocaleString("en")} tokens`;
    status.textContent = "";
    buttons();
  } catch (error) {
    status.textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    if (error.status === 401) askForKey(error.message);
    else retry = setTimeout(identify, 1000);
  }
}

watchSettings(buttons, () => { identify(); input.focus(); });
watchPictures(() => seeing, take);
whenChanged(hear);
whenBlocked(() => notify("Another tab has an older version of this page. Close it, and your conversations are here."));
buttons();
identify();
try {
  await refresh();
  if (!current && !input.value) await choose(all.find(({ id }) => id === shownId()) ?? null);
} catch (error) {
  notify(`This browser keeps no conversations: ${error?.message}.`);
}

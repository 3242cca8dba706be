// The conversations of this browser: kept, opened, renamed, deleted, saved as files and imported.

import { running } from "./answer.js";
import { Conversation } from "./conversation.js";
import { $, download, notify } from "./elements.js";
import { fromText, toJson, toMarkdown } from "./exchange.js";
import { page } from "./page.js";
import { conversations, messagesOf, remove, save } from "./store.js";

export let all = []; // conversations, or their records, the latest first
export const opened = new Map(); // conversations of which this tab has the messages, by id
export const elsewhere = new Map(); // when another tab last said that a message grows there, by the message's id
/** ms for which a message of another tab counts as growing. */
export const LIVE_FOR = 5000;

/** Saves messages of a conversation; those that could not be saved before, too. */
export async function keep(conversation, messages, live, gone) {
  all = [conversation, ...all.filter(({ id }) => id !== conversation.id)].sort((a, b) => b.changed - a.changed);
  page.list();
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

export async function load(record) {
  if (!opened.has(record.id)) {
    const messages = await messagesOf(record.id);
    if (!opened.has(record.id)) opened.set(record.id, new Conversation(record, messages));
  }
  return opened.get(record.id);
}

export async function discard(record) {
  const conversation = await load(record);
  running.get(record.id)?.drop();
  opened.delete(record.id);
  all = all.filter(({ id }) => id !== record.id);
  if (page.current === conversation) await page.choose(null);
  page.list();
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
  await page.choose(conversation);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
const downloadJson = (name, all) => download(`${name}.json`, toJson(all), "application/json");

/** Asks as what a conversation is to be saved. */
export async function chooseFile(record) {
  const conversation = await load(record);
  const name = fileName(conversation.title);
  $("saving-what").textContent = conversation.title;
  $("save-markdown").onclick = () => { download(`${name}.md`, toMarkdown(conversation)); $("saving").close(); };
  $("save-json").onclick = () => { downloadJson(name, [conversation]); $("saving").close(); };
  $("saving").showModal();
}

export async function exportAll() {
  downloadJson("conversations", await Promise.all(all.map(load)));
}

export async function importFiles(files) {
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
  if (last) await page.choose(last);
  if (!last?.unsaved) notify(count === 1 ? `Imported “${last.title}”` : `Imported ${count} conversations`);
}

/** Gives a conversation another title; with none, it stays as it was. */
export async function rename(record, title) {
  const conversation = await load(record);
  if (title.trim() && title.trim() !== conversation.title) {
    conversation.title = title.trim().slice(0, 200);
    await keep(conversation, []);
    if (conversation === page.current) page.show();
  }
  page.list();
}

/** The list as the store has it, and what the store does not have yet. */
export async function refresh() {
  const stored = await conversations();
  for (const { id, title, own = {} } of stored) {
    const known = opened.get(id);
    if (known && !known.unsaved) Object.assign(known, { title, own }); // another tab may have changed it
  }
  const others = [...opened.values()].filter((one) => !one.deleted && !stored.some(({ id }) => id === one.id));
  all = [...others, ...stored].sort((a, b) => b.changed - a.changed);
  page.list();
}

/** What another tab did. */
export async function hear({ saved, removed, messages, live, gone = [] }) {
  const known = opened.get(saved ?? removed);
  if (removed && known) {
    running.get(removed)?.drop();
    known.deleted = true;
    if (known !== page.current) opened.delete(removed);
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
      setTimeout(() => { if (known === page.current) page.show(); }, LIVE_FOR + 100); // that tab may have been closed
    }
  }
  await refresh();
  if (known && known === page.current) page.follow();
}

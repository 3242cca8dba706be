// What is asked: questions, answers and calls of the conversation that is shown.

import { isCalling, settle, stopCalls } from "./agent.js";
import { Answer, request, running } from "./answer.js";
import { cancelEdit, draft, input, type, unread } from "./composer.js";
import { Conversation } from "./conversation.js";
import { keepDraft, keepShown } from "./drafts.js";
import { $, notify } from "./elements.js";
import { discard, keep, opened } from "./library.js";
import { atEnd, update, viewOf } from "./log.js";
import { page } from "./page.js";
import { identify } from "./server.js";
import { askForKey, effective, fields, openSettings, settings } from "./settings.js";
import { offered } from "./tools.js";

const scroll = $("scroll");

export const busy = () => running.has(page.current?.id) || isCalling(page.current?.id);

export function stop() {
  running.get(page.current?.id)?.stop();
  stopCalls(page.current?.id);
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
  const done = answer.run(body, { key: settings.key, fits: page.fits, limits: page.limits }, soon);
  page.show(true);
  const { failed, model } = await done;
  clearInterval(clock);
  cancelAnimationFrame(due);
  draw();
  if (page.current === conversation) page.follow(); // what it calls is shown below it
  else page.list();
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

export async function answer(question, conversation = page.current) {
  const body = await bodyFor(conversation.upTo(question.id));
  if (!body) return page.show();
  const json = "response_format" in body;
  await stream(conversation, conversation.add(question.id, { role: "assistant", content: "", reasoning: "", json }), body);
}

/** Runs a call of an answer, or not, and lets the model go on. */
export function decide(message, call, allowed) {
  const conversation = page.current;
  return settle(conversation, message, call, allowed, {
    keep,
    show: () => { if (conversation === page.current) page.follow(); else page.list(); },
    goOn: () => answer(message, conversation),
  });
}

export async function send() {
  const content = input.value.trim();
  const { given, before: typed, kept } = draft;
  if (!(content || given.length) || busy() || unread) return;
  const edited = page.current?.messages.get(draft.editing);
  if (edited?.role === "assistant") return rewrite(edited, content);
  keepDraft(page.current, null);
  if (!page.current) {
    page.current = Conversation.begin(content || given.find(({ name }) => name)?.name || "Picture", page.fresh);
    opened.set(page.current.id, page.current);
    keepShown(page.current);
  }
  type({ text: typed, given: kept });
  keepDraft(page.current, draft);
  const [files, pictures] = [given.filter(({ name }) => name), given.filter(({ name }) => !name)];
  const shown = { ...(pictures.length ? { pictures } : {}), ...(files.length ? { files } : {}) };
  const question = page.current.add(edited ? edited.parent : page.current.leaf, { role: "user", content, ...shown });
  keep(page.current, [question]);
  await answer(question);
}

/** Adds what was typed as another version of an answer. */
function rewrite(answer, content) {
  type({ text: draft.before, given: draft.kept });
  keepDraft(page.current, draft);
  const { reasoning, thought } = answer;
  const message = page.current.add(answer.parent, { role: "assistant", content, reasoning, ...(thought ? { thought } : {}), figures: "edited" });
  keep(page.current, [message]);
  page.show();
}

/** Takes one message out of its conversation, until "Undo". */
export async function takeOut(message) {
  const conversation = page.current;
  if (busy()) return;
  if (conversation.messages.size === 1) return discard(conversation);
  if (draft.editing === message.id) cancelEdit();
  const after = conversation.takeOut(message);
  await keep(conversation, after, undefined, [message.id]);
  page.show();
  notify("Taken out", "Undo", async () => {
    conversation.putBack(message, after);
    await keep(conversation, [message, ...after]);
    page.show();
  }).focus();
}

/** Asks a question again, or that of an answer: one more answer in its place. */
export async function again(message) {
  if (busy()) return;
  const question = message.role === "user" ? message : page.current.messages.get(message.parent);
  if (question) await answer(question);
}

/** Goes on with an answer that was interrupted. */
export async function resume(message) {
  if (busy()) return;
  const conversation = page.current;
  if (message.calls) return answer(message);
  await stream(conversation, message, await bodyFor(conversation.upTo(message.id)));
}

/** Shows another version of a message, and what followed it. */
export function turn(message) {
  const label = document.activeElement?.ariaLabel;
  page.current.show(message);
  keep(page.current, []);
  if (draft.editing && !page.current.branch.some(({ id }) => id === draft.editing)) cancelEdit();
  page.show();
  viewOf(message).focus(label);
}

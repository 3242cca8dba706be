// What is typed and attached, and not sent yet.

import { draftOf, keepDraft } from "./drafts.js";
import { $ } from "./elements.js";
import { page } from "./page.js";
import { attached, readAll } from "./pictures.js";

export const input = $("input");

export let draft = draftOf(null); // what is typed for the conversation that is shown
export let unread = 0; // how often files were given that are not all read
let reading = Promise.resolve(); // of files that were given, in their order

/** Puts a draft into the composer. */
export function type(changes) {
  draft = { text: "", given: [], editing: null, before: "", kept: [], ...changes };
  input.value = draft.text;
  $("editing").hidden = !draft.editing;
  const answer = page.current?.messages.get(draft.editing)?.role === "assistant";
  $("editing-what").textContent = `What you ${answer ? "save" : "send"} becomes another version; this one is kept.`;
  showAttached();
}

function showAttached() {
  $("pictures").hidden = !draft.given.length;
  $("pictures").replaceChildren(...attached(draft.given, (index) => {
    attach(draft, page.current, draft.given.toSpliced(index, 1));
    input.focus();
  }));
  page.buttons();
}

/** Makes these the pictures and files of a conversation's draft. */
function attach(to, conversation, given) {
  to.given = given;
  keepDraft(conversation, to);
  if (to === draft) showAttached();
}

/** Adds files to what is typed, behind those given before. Nothing is sent until all are read. */
export async function take(files) {
  const [to, conversation] = [draft, page.current];
  unread += 1;
  page.buttons();
  await (reading = reading.then(() =>
    readAll(files, () => to.given.length, (one) => attach(to, conversation, [...to.given, one]))));
  unread -= 1;
  page.buttons();
  input.focus();
}

/** Takes a message into the composer; it stays where it is, and what is sent becomes another version of it. */
export function edit(message) {
  const before = draft.editing ? draft.before : input.value;
  const kept = draft.editing ? draft.kept : draft.given;
  const given = [...(message.pictures ?? []), ...(message.files ?? [])];
  type({ text: message.content, given, editing: message.id, before, kept });
  keepDraft(page.current, draft);
  page.show();
  input.focus();
}

export function cancelEdit() {
  type({ text: draft.before, given: draft.kept });
  keepDraft(page.current, draft);
  page.show();
  input.focus();
}

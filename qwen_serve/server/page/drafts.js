// What is typed and not sent, for each conversation, and which conversation this tab shows: kept over a reload.

import { settings, set } from "./settings.js";

const EMPTY = { text: "", given: [], editing: null, before: "", kept: [] };
const withoutFiles = (name, value) => (name === "given" || name === "kept" ? undefined : value); // there is no room

function put(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch { /* no room: it is kept until the page is left */ }
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem("drafts")) ?? {};
  } catch {
    return {};
  }
}

const drafts = stored();

/** `text` and what is attached (`given`): pictures, as data URLs, and files; the id of the message that is being edited, or
 * null; and from before that began the text (`before`) and what was attached (`kept`). Files do not outlive a reload. */
export const draftOf = (conversation) => ({ ...EMPTY, ...drafts[conversation?.id ?? ""] });

export function keepDraft(conversation, draft) {
  const id = conversation?.id ?? "";
  if (draft?.text || draft?.editing || draft?.given.length) drafts[id] = draft;
  else delete drafts[id];
  put("drafts", JSON.stringify(drafts, withoutFiles));
}

export const shownId = () => sessionStorage.getItem("current") ?? settings.current;

export function keepShown(conversation) {
  const id = conversation?.id ?? null;
  put("current", id ?? "");
  set({ current: id });
}

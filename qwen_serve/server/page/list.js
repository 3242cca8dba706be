// The list of conversations, and the search in them.

import { running } from "./answer.js";
import { $, element, iconButton, inItsDirection } from "./elements.js";
import { all, chooseFile, discard, rename } from "./library.js";
import { page } from "./page.js";
import { conversationsWith } from "./store.js";

export const search = $("search");
let found = null; // ids of the conversations in which what is searched for was found; null where nothing is
let renaming = null; // the id of the conversation whose title is being typed
let listed = "";

export const listedOnes = () => all.filter(({ id, title }) => !found || found.has(id) || matches(title));

export function list() {
  const shownOnes = listedOnes();
  const state = JSON.stringify([shownOnes.map(({ id, title }) => [id, title, running.has(id)]), page.current?.id, renaming]);
  if (state === listed) return; // not to take the keyboard's place away
  listed = state;
  $("conversations").replaceChildren(...shownOnes.map((record) => {
    const shown = record.id === page.current?.id;
    const row = element("div", `conversation${shown ? " current" : ""}`);
    const open = inItsDirection(element("button", "", record.title));
    if (shown) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => page.choose(record));
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
    renaming = null;
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
export async function look() {
  const wanted = words();
  const ids = wanted && await conversationsWith(({ content, files = [] }) => matches(content) || files.some(({ text }) => matches(text)));
  if (words() !== wanted) return; // more was typed meanwhile
  found = wanted ? ids : null;
  list();
  const count = listedOnes().length;
  $("found").textContent = wanted ? `${count || "Nothing"} found` : "";
}

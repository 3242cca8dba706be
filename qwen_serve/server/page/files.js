// Text files of a message: as they are read, sent and shown.

import { element, iconButton } from "./elements.js";

const MAX_BYTES = 2 ** 19; // a context of 100,000 tokens and more

/** A file as `{ name, text }`. Throws an Error that says what is wrong with it. */
export async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error(`“${file.name}” has more than ${MAX_BYTES / 1024} KiB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch { /* no UTF-8, or a folder */ }
  throw new Error(`“${file.name}” is neither a picture nor text in UTF-8.`);
}

/** A file as the model is told of it: its name, and a block of code that nothing inside ends. */
export function quoted({ name, text }) {
  const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${name}\n\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** A question as text: its files, and what was typed. */
export const asText = ({ content, files = [] }) => [...files.map(quoted), content].filter(Boolean).join("\n\n");

const sized = (length) => (length < 1024 ? `${length}\u00a0B` : `${(length / 1024).toFixed(length < 10_240 ? 1 : 0)}\u00a0KiB`);

/** Files of a message that was sent, each of which unfolds. */
export function shownFiles(files) {
  const row = element("div", "files");
  row.append(...files.map(({ name, text }) => {
    const file = element("details", "file");
    file.append(element("summary", "", `${name} · ${sized(text.length)}`), element("pre", "", text));
    file.lastChild.tabIndex = 0; // it scrolls
    return file;
  }));
  return row;
}

/** A file that is going to be sent; `drop` is called if it is not, after all. */
export function attachedFile({ name, text }, drop) {
  const root = element("span", "file");
  root.append(element("span", "", `${name} · ${sized(text.length)}`), iconButton("close", `Remove ${name}`, drop));
  return root;
}

// Text files of a message, PDF among them: as they are read, sent and shown.

import { element, iconButton } from "./elements.js";

const MAX_BYTES = 2 ** 19; // a context of 100,000 tokens and more
const CONTROLS = /[\0-\x08\x0e-\x1a\x1c-\x1f\x7f\x81\x8d\x8f\x90\x9d]/; // that no text has; escape is used in logs

/** Text in UTF-8, UTF-16 or Windows-1252; undefined where it is none. */
function decoded(bytes) {
  const zeros = [0, 1].map((odd) => bytes.filter((byte, at) => !byte && at % 2 === odd).length);
  const wide = (mark, odd) => (bytes[0] === mark && bytes[1] === 0x1ff - mark) || (bytes.length >= 8 && zeros[odd] > bytes.length / 4 && !zeros[1 - odd]);
  const name = wide(0xff, 1) ? "utf-16le" : wide(0xfe, 0) ? "utf-16be" : "utf-8";
  for (const encoding of name === "utf-8" ? [name, "windows-1252"] : [name]) {
    try {
      const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
      if (!(encoding === "utf-8" ? /\0/ : CONTROLS).test(text)) return text;
    } catch { /* another encoding, or none */ }
  }
  return undefined;
}

const starts = (bytes, text) => [...text].every((one, at) => bytes[at] === one.charCodeAt(0));

/** A file as `{ name, text }`. Throws an Error that says what is wrong with it. */
export async function readText(file) {
  const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  if (file.size > MAX_BYTES && !isPdf) throw new Error(`“${file.name}” has more than ${MAX_BYTES / 1024} KiB.`);
  let bytes;
  try {
    bytes = new Uint8Array(await file.arrayBuffer());
  } catch { // a folder
    throw new Error(`“${file.name}” cannot be read.`);
  }
  if (isPdf && starts(bytes, "%PDF-")) {
    const text = await (await import("./pdf.js")).textOfPdf(bytes, file.name);
    if (text.length > MAX_BYTES) throw new Error(`“${file.name}” has more than ${MAX_BYTES / 1024} KiB of text.`);
    return { name: file.name, text };
  }
  const text = decoded(bytes);
  if (text === undefined) throw new Error(`“${file.name}” is neither a picture nor text in UTF-8, UTF-16 or Windows-1252, nor PDF.`);
  return { name: file.name, text };
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

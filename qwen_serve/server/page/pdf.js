// The text of PDF files, by pdf.js, which is loaded when the first one is given. It runs no script of a file and fetches nothing that a file names.

import { GlobalWorkerOptions, getDocument } from "./vendor/pdf.min.mjs";

GlobalWorkerOptions.workerSrc = new URL("./vendor/pdf.worker.min.mjs", import.meta.url).href;

/** How the codes of Chinese, Japanese and Korean fonts map to characters: those that a file names are loaded. */
const CMAPS = { cMapUrl: new URL("./vendor/cmaps/", import.meta.url).href, cMapPacked: true };

const MAX_PAGES = 2000;

/** The lines of a page; an empty one where more than a line's height is between two. */
function linesOf(items) {
  let text = "", last = null;
  for (const { str, transform, height, hasEOL } of items) {
    if (str === undefined) continue; // a mark of the structure
    const y = transform[5];
    if (last && text.endsWith("\n") && Math.abs(last.y - y) > 1.8 * (height || last.height || 1)) text += "\n";
    text += str;
    if (str.trim()) last = { y, height };
    if (hasEOL) text += "\n";
  }
  return text.trim();
}

/** The text of a PDF. Throws an Error that says why there is none. */
export async function textOfPdf(data, name) {
  const task = getDocument({ data, ...CMAPS, isEvalSupported: false, useWasm: false, useSystemFonts: false, disableFontFace: true, enableXfa: false, stopAtErrors: false, verbosity: 0 });
  try {
    const pdf = await task.promise;
    if (pdf.numPages > MAX_PAGES) throw new Error(`“${name}” has more than ${MAX_PAGES} pages.`);
    const pages = [];
    for (let number = 1; number <= pdf.numPages; number += 1) {
      const page = await pdf.getPage(number);
      pages.push(linesOf((await page.getTextContent()).items));
      page.cleanup();
    }
    if (!pages.some(Boolean)) throw new Error(`“${name}” has no text: its pages are pictures, perhaps of a scanner.`);
    return pages.map((text, index) => (pages.length > 1 ? `[Page ${index + 1}]\n\n${text}` : text)).join("\n\n");
  } catch (error) {
    if (error.name === "PasswordException") throw new Error(`“${name}” needs a password.`);
    if (error.name === "InvalidPDFException") throw new Error(`“${name}” is damaged.`);
    throw error;
  } finally {
    await task.destroy();
  }
}

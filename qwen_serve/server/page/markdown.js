// Markdown to elements, safely, and cheaply while it streams. HTML in an answer is shown as text.

import { copy, element, iconButton, inItsDirection } from "./elements.js";
import { escaped, mathExtension, typeset, whilePartial } from "./math.js";

const { marked, DOMPurify, hljs } = globalThis;

marked.use(mathExtension, {
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // nothing is fetched
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

const SANITIZE = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "a", "ul",
    "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "input", "span"],
  ALLOWED_ATTR: ["href", "class", "start", "type", "checked", "disabled", "align", "data-math"],
  RETURN_DOM_FRAGMENT: true,
};

const DEEPEST = 450; // elements within each other: a tab ends at about 900 of KaTeX's

/** Whether elements below `root` are nested more deeply than `limit`. */
function deeper(root, limit) {
  let level = [root];
  for (let depth = 0; level.length && depth <= limit; depth++) level = level.flatMap((each) => [...each.children]);
  return level.length > 0;
}

/** A code block with its language, a way to copy it, and colours where the language is known. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const text = code.textContent;
  if (hljs.getLanguage(language)) code.innerHTML = hljs.highlight(text, { language }).value;
  const block = Object.assign(element("div", "block"), { dir: "ltr" });
  const bar = element("div", "bar");
  const button = iconButton("copy", "Copy", () => copy(text, button));
  bar.append(element("span", "", language || "text"), button);
  pre.tabIndex = 0; // it scrolls
  pre.replaceWith(block);
  block.append(bar, pre);
}

function elements(token, links) {
  const tokens = Object.assign([token], { links });
  const holder = inItsDirection(element("div"));
  holder.append(DOMPurify.sanitize(marked.parser(tokens), SANITIZE));
  typeset(holder);
  for (const pre of holder.querySelectorAll("pre")) codeBlock(pre);
  for (const table of holder.querySelectorAll("table")) {
    const frame = element("div", "table");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return holder;
}

/** Calls `make`; what is nested too deeply to be parsed or laid out becomes what `otherwise` returns. */
function unlessTooDeep(make, otherwise) {
  try {
    return make();
  } catch (error) {
    if (error.name !== "RangeError" && error.name !== "InternalError") throw error; // the second is Firefox's
    return otherwise();
  }
}

function block(token, links) {
  const made = elements(token, links);
  if (deeper(made, DEEPEST)) throw new RangeError("nested too deeply");
  return made;
}

/** Shows `text` in `target`, `partial` if more of it is to come; blocks that are as they were before are left alone. */
export function render(target, text, partial = false) {
  const whole = () => Object.assign([{ type: "text", raw: text, text: escaped(text) }], { links: {} });
  const tokens = unlessTooDeep(() => whilePartial(partial, () => marked.lexer(text)), whole);
  const { links } = tokens;
  tokens.forEach((token, index) => {
    const old = target.children[index];
    const open = partial && index === tokens.length - 1;
    if (old?.source === token.raw && old.open === open) return;
    const asWritten = () => inItsDirection(element("div", "written", token.raw));
    const made = Object.assign(unlessTooDeep(() => block(token, links), asWritten), { source: token.raw, open });
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > tokens.length) target.lastChild.remove();
}

// Markdown to elements, safely, and cheaply while it streams. HTML in an answer is shown as text.

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

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.append(document.createElementNS("http://www.w3.org/2000/svg", "use"));
  svg.firstChild.setAttribute("href", `#i-${name}`);
  return svg;
}

export function iconButton(name, label, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "icon";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(icon(name));
  button.addEventListener("click", action);
  return button;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure context: http:// on another machine
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.title;
  button.title = "Copied";
  button.classList.add("done");
  setTimeout(() => { button.title = before; button.classList.remove("done"); }, 1200);
}

/** A code block with its language, a way to copy it, and colours where the language is known. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const text = code.textContent;
  if (hljs.getLanguage(language)) code.innerHTML = hljs.highlight(text, { language }).value;
  const block = document.createElement("div");
  block.className = "block";
  const bar = document.createElement("div");
  bar.className = "bar";
  const name = document.createElement("span");
  name.textContent = language || "text";
  const button = iconButton("copy", "Copy", () => copy(text, button));
  bar.append(name, button);
  pre.replaceWith(block);
  block.append(bar, pre);
}

function elements(token, links) {
  const tokens = Object.assign([token], { links });
  const holder = document.createElement("div");
  holder.append(DOMPurify.sanitize(marked.parser(tokens), SANITIZE));
  typeset(holder);
  for (const pre of holder.querySelectorAll("pre")) codeBlock(pre);
  for (const table of holder.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    table.replaceWith(frame);
    frame.append(table);
  }
  return holder;
}

/** Shows `text` in `target`, `partial` if more of it is to come; blocks that are as they were before are left alone. */
export function render(target, text, partial = false) {
  const tokens = whilePartial(partial, () => marked.lexer(text));
  const { links } = tokens;
  tokens.forEach((token, index) => {
    const old = target.children[index];
    const open = partial && index === tokens.length - 1;
    if (old?.source === token.raw && old.open === open) return;
    const made = Object.assign(elements(token, links), { source: token.raw, open });
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > tokens.length) target.lastChild.remove();
}

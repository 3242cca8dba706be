// LaTeX in Markdown: found before Markdown can change it, shown by KaTeX. What KaTeX cannot read stays as it was written.

const { katex } = globalThis;

const LONGEST = 10_000; // characters of a formula that is rendered
const KEPT = 500; // rendered formulas that are kept: a streaming paragraph is drawn again and again

// no formula goes over a blank line, or into a code block
const BODY = String.raw`(?:(?!\n[ \t]*(?:\n|$|${"```"}|~~~))(?:\\?[^\\]|\\\\))+?`;
const DISPLAY = String.raw`\$\$(?!\$)${BODY}\$\$|\\\[${BODY}\\\](?!\()`;
// as Pandoc: no space inside the dollars, no digit behind them; and no price: "$5 for one, or 9$ for two"
const DOLLARS = String.raw`\$(?![\s$]|\d[\d.,]*(?:\s+[A-Za-z]{2}|[);:]))(?:\\[^\n]|[^\\\n$${"`"}])*?(?<!\s)\$(?![\d$])`;
const PAREN = String.raw`\\\(${BODY}\\\)`;
const INLINE = `${DISPLAY}|${PAREN}|${DOLLARS}`;

const BLOCK_HERE = new RegExp(`^ {0,3}(?:${DISPLAY})[ \\t]*(?:\\n|$)`);
const INLINE_HERE = new RegExp(`^(?:${INLINE})`);
const ALL_INLINE = new RegExp(`(?<![\\\\\\w$])${DOLLARS}|(?<!\\\\)(?:${DISPLAY}|${PAREN})`, "g");
// what may become a formula when more of the answer is there
const BEGUN = new RegExp(String.raw`^(?:\$\$(?!\$)|\\[[(])(?:${BODY})?\\?$`);
const BEGUN_BLOCK = new RegExp(String.raw`^ {0,3}(?:\$\$(?!\$)|\\\[)(?:${BODY})?\\?\$?\n?$`);

let partial = false;

/** Calls `work` for a text that is not complete: a formula whose end is not there yet is plain text. */
export function whilePartial(isPartial, work) {
  partial = isPartial;
  try {
    return work();
  } finally {
    partial = false;
  }
}

export const escaped = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

function found(type, match) {
  return match && { type, raw: match[0], text: match[0].trim(), complete: true };
}

function begun(type, pattern, src) {
  const match = partial && pattern.exec(src);
  return match ? { type, raw: match[0], text: match[0], complete: false } : undefined;
}

// filled in by `typeset` when the HTML was sanitized
const placeholder = (tag) => ({ text, complete }) => {
  const span = complete ? `<span data-math>${escaped(text)}</span>` : escaped(text);
  return tag ? `<${tag}>${span}</${tag}>\n` : span;
};

const displayMath = {
  name: "displayMath",
  level: "block",
  start: (src) => {
    if (!src.includes("$$") && !src.includes("\\[")) return undefined;
    const line = /\n {0,3}(?:\$\$|\\\[)/.exec(src);
    return line ? line.index + 1 : undefined;
  },
  tokenizer: (src) => found("displayMath", BLOCK_HERE.exec(src)) ?? begun("displayMath", BEGUN_BLOCK, src),
  renderer: placeholder("p"),
};

const inlineMath = {
  name: "inlineMath",
  level: "inline",
  start: (src) => {
    const at = src.search(/(?<![\w$])\$|\$\$|\\[[(]/);
    return at < 0 ? undefined : at;
  },
  tokenizer: (src) => found("inlineMath", INLINE_HERE.exec(src)) ?? begun("inlineMath", BEGUN, src),
  renderer: placeholder(""),
};

/** For `marked.use`. */
export const mathExtension = {
  extensions: [displayMath, inlineMath],
  hooks: { emStrongMask: (src) => src.replace(ALL_INLINE, (raw) => "a".repeat(raw.length)) }, // $a*b$ ends no emphasis
};

const rendered = new Map();

function formula(source) {
  const single = source.startsWith("$") && !source.startsWith("$$");
  const displayMode = source.startsWith("$$") || source.startsWith("\\[");
  const tex = single ? source.slice(1, -1) : source.slice(2, -2);
  const holder = document.createElement("span");
  holder.className = displayMode ? "math display" : "math";
  try {
    if (tex.length > LONGEST) throw new RangeError(`a formula of more than ${LONGEST} characters`);
    katex.render(tex, holder, { displayMode, throwOnError: false, trust: false, strict: "ignore", maxExpand: 1000, maxSize: 20 });
    const wrong = holder.querySelector(":scope > .katex-error");
    if (!wrong) return holder;
    holder.title = wrong.title;
  } catch (error) { // nested too deeply, or too long
    holder.title = error.message;
  }
  holder.className = "math bad";
  holder.textContent = source;
  return holder;
}

/**
 * Renders the formulas below `root`. KaTeX makes elements, no HTML: its styles are set by script, which the page's policy
 * allows, and with `trust: false` it makes no links, images, classes or ids that a formula asks for.
 */
export function typeset(root) {
  for (const span of root.querySelectorAll("[data-math]")) {
    const source = span.textContent;
    if (!rendered.has(source)) {
      if (rendered.size >= KEPT) rendered.clear();
      rendered.set(source, formula(source));
    }
    span.replaceWith(rendered.get(source).cloneNode(true));
  }
}

// Conversations of other programs' files, as those of this page: `{ title, changed, leaf, own, messages }`.

import { shortened } from "./conversation.js";

const SAID = { human: "user", user: "user", gpt: "assistant", assistant: "assistant", chatgpt: "assistant", bing: "assistant", bard: "assistant", model: "assistant", system: "system" };

const titleOf = (given, messages) =>
  shortened(String(given || messages.find(({ role }) => role === "user")?.content || "Imported").trim().split("\n")[0]) || "Imported";

/** A message's text and pictures, from a string or from OpenAI's parts. */
function contentOf(content) {
  if (typeof content === "string") return { content };
  const parts = Array.isArray(content) ? content : [];
  const pictures = parts.filter(({ type }) => type === "image_url").map(({ image_url: picture }) => picture?.url ?? picture)
    .filter((url) => /^data:image\/[a-z+.-]+;base64,/.test(url));
  const texts = parts.map((part) => (typeof part === "string" ? part : part?.text)).filter((text) => typeof text === "string");
  return { content: texts.join("\n\n"), ...(pictures.length ? { pictures } : {}) };
}

/** Messages that follow each other; the system's become the conversation's system prompt. */
function inOrder(title, given) {
  const system = given.filter(({ role }) => role === "system").map(({ content }) => contentOf(content).content);
  const messages = given.filter(({ role, content }) => ["user", "assistant"].includes(role) && content != null)
    .map(({ role, content, reasoning_content: reasoning }, at) =>
      ({ id: at, parent: at ? at - 1 : null, created: at, role, ...contentOf(content), ...(reasoning ? { reasoning } : {}) }));
  if (!messages.length) throw new Error("it has no messages");
  return { title: titleOf(title, messages), leaf: messages.at(-1).id, messages, own: system.length ? { system: system.join("\n\n") } : {} };
}

/** A tree without the nodes for which `read` returns nothing: what followed them follows what was before. */
function fromTree(title, nodes, leaf, changed, read) {
  const known = new Map(nodes.map((node) => [node.id, { node, said: read(node) }]));
  const shown = (id) => {
    const seen = new Set();
    while (known.has(id) && !known.get(id).said && !seen.has(id)) seen.add(id) && (id = known.get(id).node.parent);
    return known.get(id)?.said ? id : null;
  };
  let system;
  const messages = [];
  for (const { node, said } of known.values()) {
    if (said) messages.push({ id: node.id, parent: shown(node.parent), ...said });
    else if (node.system) system ??= node.system;
  }
  if (!messages.length) throw new Error("it has no messages");
  return { title: titleOf(title, messages), changed, leaf: shown(leaf) ?? messages.at(-1).id, messages, own: system ? { system } : {} };
}

const files = (extra, type) => (Array.isArray(extra) ? extra : []).filter((one) => type.includes(one?.type));

function ofLlamaServer({ conv, messages }) {
  const nodes = messages.map((one) => ({ ...one, system: one.role === "system" && one.content }));
  return fromTree(conv.name, nodes, conv.currNode, conv.lastModified, ({ type, role, content, timestamp, thinking, reasoningContent, extra }) => {
    if (type === "root" || !["user", "assistant"].includes(role) || typeof content !== "string") return null;
    const pictures = files(extra, ["IMAGE", "imageFile"]).map(({ base64Url }) => base64Url);
    const texts = files(extra, ["TEXT", "textFile", "context"]).map(({ name, content: text }) => ({ name: String(name), text: String(text) }));
    const reasoning = reasoningContent ?? thinking;
    return { role, content, created: timestamp, ...(reasoning ? { reasoning } : {}), ...(pictures.length ? { pictures } : {}), ...(texts.length ? { files: texts } : {}) };
  });
}

function ofChatGpt({ title, mapping, current_node: leaf, update_time: changed }) {
  const textOf = ({ content }) => contentOf(content?.parts ?? content?.text ?? "").content;
  const nodes = Object.entries(mapping).map(([id, { parent, message }]) =>
    ({ id, parent: parent ?? null, message, system: message?.author?.role === "system" && textOf(message) }));
  return fromTree(title, nodes, leaf, changed * 1000, ({ message }) => {
    const role = message?.author?.role;
    if (!["user", "assistant"].includes(role) || (message.recipient ?? "all") !== "all") return null;
    const content = textOf(message);
    return content.trim() ? { role, content, created: (message.create_time ?? 0) * 1000 } : null;
  });
}

function ofOne(given) {
  if (given?.conv && Array.isArray(given.messages)) return ofLlamaServer(given);
  if (given?.mapping && typeof given.mapping === "object") return ofChatGpt(given);
  const turns = given?.conversations ?? given?.items;
  if (Array.isArray(turns) && turns.every((turn) => turn && "from" in turn)) {
    const messages = turns.map(({ from, value }) => ({ role: SAID[from], content: String(value ?? "") }));
    return inOrder(given.title, given.system ? [{ role: "system", content: String(given.system) }, ...messages] : messages);
  }
  if (Array.isArray(given?.messages)) return inOrder(given.title ?? given.name, given.messages);
  throw new Error("its format is not known: want this page's, llama-server's, ChatGPT's, ShareGPT's, or a list of messages");
}

/** The conversations of a file's JSON. Throws an Error that says what is wrong with it. */
export function fromElsewhere(given) {
  if (!Array.isArray(given)) return [ofOne(given)];
  if (given.length && given.every((one) => one && "role" in one && "content" in one)) return [inOrder("", given)];
  return given.map(ofOne);
}

// Conversations as files: JSON has all of them, every branch, and Markdown the branch that is shown of one. Both are read again.

import { Conversation, newId } from "./conversation.js";
import { asText, quoted } from "./files.js";
import { fromElsewhere } from "./foreign.js";
import { OWN } from "./settings.js";

const FORMAT = "qwen-serve conversations";
const HEADING = /^## (You|Model)$/m;
const TEXTS = ["reasoning", "figures", "problem"], NUMBERS = ["thought", "used"], FLAGS = ["interrupted", "json", "full"];

export const toJson = (conversations) => JSON.stringify({
  format: FORMAT,
  version: 1,
  conversations: conversations.map((one) => ({ ...one.record, messages: [...one.messages.values()] })),
}, null, 1);

/** The branch that is shown. A line that would pass for a heading of its own gets a backslash, which Markdown does not show. */
export function toMarkdown(conversation) {
  const said = conversation.branch.map((message) => {
    const shown = (message.pictures ?? []).map((_, index) => `[Picture ${index + 1}]`).join(" ");
    const calls = (message.calls ?? []).map(({ name, arguments: given, result = "" }) => quoted({ name, text: `${given}\n${result}` }));
    const text = [shown, asText(message).trim(), ...calls].filter(Boolean).join("\n\n").replace(/^(\\*)(?=## (You|Model)$)/gm, "\\$1");
    return `## ${message.role === "user" ? "You" : "Model"}\n\n${text}\n`;
  });
  return [`# ${conversation.title}\n`, ...said].join("\n");
}

function fromMarkdown(text) {
  const [head, ...parts] = text.replaceAll("\r\n", "\n").split(HEADING);
  const title = /^# (.+)$/m.exec(head)?.[1];
  if (!title || !parts.length) throw new Error("it has no “# title” with “## You” and “## Model” below it");
  const messages = [];
  for (let at = 0; at < parts.length; at += 2) {
    const content = parts[at + 1].trim().replace(/^\\(?=\\*## (You|Model)$)/gm, "");
    const role = parts[at] === "You" ? "user" : "assistant";
    messages.push({ id: at, parent: at ? at - 2 : null, created: at, role, content });
  }
  return [{ title, leaf: messages.at(-1).id, messages }];
}

/** Only what the page knows, of the right kind: a file may come from anywhere. */
function checked(given, id, parent, conversation) {
  const { role, content, created, pictures = [], files = [] } = given;
  if (!["user", "assistant"].includes(role) || typeof content !== "string") throw new Error("a message has no role or no content");
  const message = { id, conversation, parent, created: Number(created) || 0, role, content };
  if (role === "assistant") message.reasoning = "";
  for (const name of TEXTS) if (typeof given[name] === "string") message[name] = given[name];
  for (const name of NUMBERS) if (Number.isFinite(given[name])) message[name] = given[name];
  for (const name of FLAGS) if (given[name] === true) message[name] = true;
  if (!pictures.every((url) => /^data:image\/[a-z+.-]+;base64,/.test(url))) throw new Error("a picture is none");
  if (!files.every(({ name, text }) => typeof name === "string" && typeof text === "string")) throw new Error("a file is none");
  const calls = given.calls ?? [];
  if (!calls.every(({ id: its, name, arguments: text }) => [its, name, text].every((one) => typeof one === "string"))) throw new Error("a call is none");
  if (calls.length && role === "assistant") {
    message.calls = calls.map(({ id: its, name, arguments: text, result, failed }) =>
      ({ id: its, name, arguments: text, ...(typeof result === "string" ? { result } : {}), ...(failed === true ? { failed } : {}) }));
  }
  if (pictures.length) message.pictures = pictures;
  if (files.length) message.files = files.map(({ name, text }) => ({ name, text }));
  return message;
}

const ownOf = (own) => Object.fromEntries(OWN.filter((name) => typeof own?.[name] === "string").map((name) => [name, own[name]]));

/** Throws if a message follows itself, at any distance: nobody would reach the first one. */
function refuseCircles(messages) {
  const parents = new Map(messages.map(({ id, parent }) => [id, parent]));
  const fine = new Set([null]);
  for (const { id } of messages) {
    const path = new Set();
    for (let at = id; !fine.has(at); at = parents.get(at)) {
      if (path.has(at)) throw new Error("a message follows itself");
      path.add(at);
    }
    for (const each of path) fine.add(each);
  }
}

function made({ title, changed, leaf, messages, own }) {
  if (typeof title !== "string" || !Array.isArray(messages)) throw new Error("a conversation has no title or no messages");
  const id = newId();
  const ids = new Map(messages.map((message) => [message.id, newId()])); // new ones: it may be here already
  const parentOf = ({ parent }) => {
    if (parent !== null && !ids.has(parent)) throw new Error("a message follows one that is not there");
    return parent === null ? null : ids.get(parent);
  };
  refuseCircles(messages.map(({ id, parent }) => ({ id: ids.get(id), parent: parentOf({ parent }) })));
  const all = messages.map((message) => checked(message, ids.get(message.id), parentOf(message), id));
  return new Conversation({ id, title: title.slice(0, 200), changed: Number(changed) || Date.now(), leaf: ids.get(leaf), own: ownOf(own) }, all);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const lines = text.split("\n").filter((line) => line.trim());
    if (lines.length < 2) throw error;
    return lines.map((line) => JSON.parse(line)); // JSON Lines
  }
}

/** The conversations of a file: of this page, of llama-server's, ChatGPT's, ShareGPT's, or lists of OpenAI's messages. Throws
 * an Error that says what is wrong with it. */
export function fromText(text) {
  if (!/^[{[]/.test(text.trimStart())) return fromMarkdown(text).map(made);
  const given = parsed(text);
  if (given.format !== FORMAT) return fromElsewhere(given).map(made);
  if (!Array.isArray(given.conversations)) throw new Error("it has no conversations");
  return given.conversations.map(made);
}

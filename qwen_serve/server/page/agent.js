// What the model calls: each call is shown, runs when the user allows it, and then the model goes on.

import { element } from "./elements.js";
import { origin, runCall } from "./tools.js";

const NOT_ALLOWED = "The user did not allow this call.";
/** What the model is told of a call that the user passed over. */
export const PASSED_OVER = "This call was not run.";

const calling = new Map(); // what stops the calls that run, by conversation's id
const active = new WeakSet(); // calls that run

export const isCalling = (id) => calling.has(id);
export const stopCalls = (id) => calling.get(id)?.abort();

/** Runs a call of `message`, or not; `keep` saves, `show` shows, and `goOn` lets the model answer once all are settled. */
export async function settle(conversation, message, call, allowed, { keep, show, goOn }) {
  if (active.has(call) || call.result !== undefined || calling.has(conversation.id)) return;
  let result = { failed: true, text: NOT_ALLOWED }, stopped = false;
  if (allowed) {
    const controller = new AbortController();
    calling.set(conversation.id, controller);
    active.add(call);
    show();
    result = await runCall(call, controller.signal);
    stopped = controller.signal.aborted;
    calling.delete(conversation.id);
    active.delete(call);
  }
  call.result = result.text;
  if (result.failed) call.failed = true;
  if (conversation.messages.get(message.id) !== message) return show(); // it was taken out
  await keep(conversation, [message]);
  show();
  if (!stopped && conversation.leaf === message.id && message.calls.every((one) => one.result !== undefined)) await goOn(conversation, message);
}

/** A call's arguments to read: code as it is, others as JSON. */
function argumentsOf({ arguments: text }) {
  try {
    const given = JSON.parse(text);
    const values = Object.values(given);
    if (values.length === 1 && typeof values[0] === "string") return `${Object.keys(given)[0]}: ${values[0]}`;
    return JSON.stringify(given, null, 2);
  } catch {
    return text;
  }
}

function scrolling(text, className = "") {
  const made = element("pre", className, text);
  made.tabIndex = 0;
  made.dir = "auto";
  return made;
}

/** The calls of a message; `decide(call, allowed)` is called by their buttons, which are there while `open`. */
export function shownCalls(calls, open, decide) {
  return calls.map((call) => {
    const card = element("div", "call");
    card.setAttribute("role", "group");
    card.setAttribute("aria-label", `Call of ${call.name}`);
    const head = element("div", "head");
    head.append(element("code", "", call.name), element("span", "quiet", origin(call.name) ?? ""));
    card.append(head, scrolling(argumentsOf(call)));
    if (active.has(call)) card.append(Object.assign(element("span", "waiting"), { title: "It runs" }));
    else if (call.result !== undefined) {
      const result = element("details", call.failed ? "failed" : "");
      result.open = call.result.length < 2000;
      result.append(element("summary", "", call.failed ? "It failed" : "Result"), scrolling(call.result));
      card.append(result);
    } else if (open) {
      const row = element("div", "row");
      for (const [label, allowed] of [["Run", true], ["Do not run", false]]) {
        const button = element("button", "chip", label);
        button.type = "button";
        button.addEventListener("click", () => decide(call, allowed));
        row.append(button);
      }
      card.append(row);
    } else card.append(element("span", "quiet", "It was not run."));
    return card;
  });
}

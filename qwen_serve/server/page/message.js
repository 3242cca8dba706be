// A message as the page shows it.

import { shownCalls } from "./agent.js";
import { copy, element, icon, iconButton, inItsDirection, seconds } from "./elements.js";
import { render } from "./markdown.js";
import { shownFiles } from "./files.js";
import { shown } from "./pictures.js";

export class MessageView {
  /** `actions`: what its buttons do, each called with the message. */
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.root = element("article", `message ${message.role}`);
    this.root.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    this.foot = element("div", "foot");
    if (message.role === "user") {
      if (message.pictures) this.root.append(shown(message.pictures));
      if (message.files) this.root.append(shownFiles(message.files));
      if (message.content) this.root.append(inItsDirection(element("div", "text", message.content)));
      this.root.append(this.foot);
      return;
    }
    this.thinking = element("details", "thinking");
    this.summary = element("summary");
    this.summaryText = element("span");
    this.summary.append(icon("fold"), this.summaryText);
    this.thought = inItsDirection(element("div"));
    this.thinking.append(this.summary, this.thought);
    this.content = element("div", "markdown");
    this.calls = element("div", "calls");
    this.waiting = element("span", "waiting");
    this.problem = element("p", "problem");
    this.root.append(this.thinking, this.content, this.calls, this.waiting, this.problem, this.foot);
  }

  /** Shows what has come; `live` while more is to come, with `thought` ms of thinking so far. */
  update(live, thought) {
    if (this.message.role === "user") return;
    const { reasoning, content, problem, json } = this.message;
    this.thinking.hidden = !reasoning;
    if (reasoning) {
      const time = thought === undefined ? "" : ` ${seconds(thought)}`;
      const thinks = live && this.message.thought === undefined;
      this.summaryText.textContent = thinks ? `Thinking…${time}` : time ? `Thought for${time}` : "Thoughts";
      const shown = reasoning.trim();
      if (this.thought.textContent !== shown) this.thought.textContent = shown;
    }
    render(this.content, json && content ? "```json\n" + content + "\n```" : content, live);
    this.waiting.hidden = !live || Boolean(reasoning || content);
    this.problem.hidden = !problem;
    this.problem.textContent = problem ?? "";
    this.root.setAttribute("aria-busy", live); // a screen reader waits for the whole answer
  }

  /** Shows the buttons: `siblings` are what was said in its place, `last` whether nothing follows it. */
  updateFoot(siblings, live, last) {
    const { role, content, reasoning, figures, interrupted, problem, json, full, calls } = this.message;
    const { begin, decide, edit, again, resume, takeOut, turn } = this.actions;
    if (calls) this.calls.replaceChildren(...shownCalls(calls, last && !live, (call, allowed) => decide(this.message, call, allowed)));
    const focused = this.foot.contains(document.activeElement) && document.activeElement.ariaLabel;
    const button = (name, label, action) => iconButton(name, label, () => action(this.message));
    const parts = [];
    if (siblings.length > 1) {
      const place = siblings.indexOf(this.message);
      const before = button("left", "Version before", () => turn(siblings[place - 1]));
      const after = button("fold", "Next version", () => turn(siblings[place + 1]));
      before.disabled = place === 0;
      after.disabled = place === siblings.length - 1;
      const count = element("span", "count", `${place + 1}/${siblings.length}`);
      count.setAttribute("aria-label", `version ${place + 1} of ${siblings.length}`);
      parts.push(before, count, after);
    }
    if (role === "user") {
      parts.push(button("edit", "Edit and ask again", edit));
      if (last) parts.push(button("again", "Answer", again));
      parts.push(button("bin", "Take out", takeOut));
    } else if (!live) {
      if (content) {
        const copier = iconButton("copy", "Copy", () => copy(content, copier));
        parts.push(copier);
      }
      parts.push(button("again", "Answer again", again));
      if (!json && !calls) parts.push(button("edit", "Edit what was said", edit));
      parts.push(button("bin", "Take out", takeOut));
      if (full) parts.push(button("new", "New conversation", begin));
      else if (calls && last && calls.every(({ result }) => result !== undefined)) parts.push(button("go-on", "Continue", resume));
      else if (interrupted && (content || reasoning) && !json) parts.push(button("go-on", "Continue", resume));
      const said = figures || (interrupted && !problem ? "interrupted" : "");
      if (said) parts.push(element("span", "figures", said));
    }
    for (const part of parts) if (["Answer", "Answer again", "Continue", "Take out"].includes(part.ariaLabel)) part.classList.add("asks");
    this.foot.classList.toggle("kept", siblings.length > 1 || (role === "user" && last));
    this.foot.replaceChildren(...parts);
    if (focused) this.focus(focused);
  }

  /** Moves the keyboard to the button with this label, or to the first there is. */
  focus(label) {
    const buttons = [...this.foot.querySelectorAll("button:not(:disabled)")];
    (buttons.find((button) => button.ariaLabel === label) ?? buttons[0])?.focus();
  }
}

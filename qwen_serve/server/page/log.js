// The messages of the conversation that is shown, and what is said about it.

import { running } from "./answer.js";
import { draft } from "./composer.js";
import { $, element, inItsDirection } from "./elements.js";
import { elsewhere, keep, LIVE_FOR } from "./library.js";
import { MessageView } from "./message.js";
import { page } from "./page.js";
import { showOwn, told } from "./settings.js";

const log = $("log"), scroll = $("scroll");

const views = new WeakMap();
/** What the buttons of a message do, by name. */
export const actions = {};

export function viewOf(message) {
  if (!views.has(message)) views.set(message, new MessageView(message, actions));
  return views.get(message);
}

export function update(message) {
  const answer = running.get(message.conversation);
  const here = answer?.message === message;
  const live = here || Date.now() - elsewhere.get(message.id) < LIVE_FOR;
  viewOf(message).update(live, here ? answer.thought : message.thought);
  return live;
}

export const atEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;

/** Draws the branch of the conversation that is shown. */
export function drawBranch() {
  const branch = page.current?.branch ?? [];
  const shown = branch.map((message) => viewOf(message).root);
  if (shown.length !== log.children.length || shown.some((root, index) => root !== log.children[index])) {
    log.replaceChildren(...shown);
  }
  let later = false; // behind the message that is edited
  for (const message of branch) {
    const live = update(message);
    viewOf(message).updateFoot(page.current.siblings(message), live, message === branch.at(-1));
    later ||= message.id === draft.editing;
    viewOf(message).root.classList.toggle("later", later);
  }
}

/** Says the conversation's system prompt and sampling on it. */
export function showTold() {
  const { system, numbers } = told();
  $("own").hidden = !(system || numbers);
  $("own").replaceChildren(...[system && inItsDirection(element("span", "system", system)), numbers && element("span", "", numbers)].filter(Boolean));
}

/** Gives the settings what this conversation has of its own. */
export function giveOwn() {
  const conversation = page.current;
  showOwn(conversation ? conversation.own : page.fresh, () => { if (conversation) keep(conversation, []); });
}

/** Says how much of the context the conversation takes. */
export function showUse() {
  const used = page.current?.branch.findLast((message) => message.used)?.used;
  $("context").textContent = used && page.fits ? `${used.toLocaleString("en")} of ${page.fits.toLocaleString("en")} tokens` : "";
  $("use").hidden = !(used && page.fits);
  Object.assign($("use"), { max: page.fits || 1, high: 0.8 * page.fits, optimum: 0, value: used ?? 0, title: $("context").textContent });
}

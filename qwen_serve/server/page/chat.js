// The chat page: its parts put together, and its start.

import { addressed, asked, showAddress, whenAddressed } from "./address.js";
import { again, decide, resume, send, takeOut, turn } from "./asking.js";
import { draft, edit, input, take, type, unread } from "./composer.js";
import { buttons } from "./controls.js";
import { draftOf, keepShown, shownId } from "./drafts.js";
import { $, notify } from "./elements.js";
import { all, hear, load, refresh } from "./library.js";
import { list } from "./list.js";
import { actions, atEnd, drawBranch, giveOwn, showTold, showUse } from "./log.js";
import { page } from "./page.js";
import { example, watchFiles } from "./pictures.js";
import { identify } from "./server.js";
import { set, watchSettings } from "./settings.js";
import { whenBlocked, whenChanged } from "./store.js";
import { watchTools } from "./tools.js";

const scroll = $("scroll");

$("unloaded").remove();

/** Shows the branch of the conversation; at its end, unless the reader looks elsewhere. */
function show(end = false) {
  const top = scroll.scrollTop;
  drawBranch();
  $("empty").hidden = Boolean(page.current);
  giveOwn();
  showUse();
  showTold();
  showAddress(page.current);
  document.title = page.current ? `${page.current.title} · qwen-serve` : "qwen-serve";
  scroll.scrollTop = end ? scroll.scrollHeight : top;
  list();
  buttons();
}

let choosing;

async function choose(record) {
  choosing = record;
  let conversation = null;
  try {
    conversation = record && await load(record);
  } catch (error) {
    notify(`“${record.title}” cannot be read: ${error?.message}.`);
    return;
  }
  if (choosing !== record) return; // another was chosen meanwhile
  page.current = conversation;
  page.fresh = {};
  keepShown(page.current);
  type(draftOf(page.current));
  document.body.classList.remove("open-side");
  show(true);
  if (matchMedia("(hover: hover)").matches) input.focus();
}

Object.assign(page, { show, follow: () => show(atEnd()), list, buttons, choose });
Object.assign(actions, { begin: () => choose(null), decide, edit, again, resume, takeOut, turn });

document.addEventListener("visibilitychange", () => { if (!document.hidden) identify(); });
watchSettings(buttons, () => { identify(); input.focus(); });
watchFiles(() => page.seeing, take);
$("example").addEventListener("click", async () => {
  const { file, question } = await example();
  set({ think: false }); // the bundled model answers about pictures without thoughts alone
  input.value = question;
  input.dispatchEvent(new Event("input"));
  await take([file]);
});
watchTools(buttons);
whenAddressed((id) => {
  if (id !== (page.current?.id ?? null)) choose(all.find((one) => one.id === id) ?? null);
});
whenChanged(hear);
whenBlocked(() => notify("Another tab has an older version of this page. Close it, and your conversations are here."));
buttons();
const identified = identify();
try {
  await refresh();
  const question = asked();
  if (question) {
    await identified;
    await choose(null);
    type({ text: question });
    await send();
  } else if (addressed() || (!page.current && !input.value && !draft.given.length && !unread)) {
    await choose(all.find(({ id }) => id === (addressed() ?? shownId())) ?? null);
  }
} catch (error) {
  notify(`This browser keeps no conversations: ${error?.message}.`);
}

// Buttons, keys and clicks.

import { busy, send, stop } from "./asking.js";
import { cancelEdit, draft, edit, input, unread } from "./composer.js";
import { keepDraft } from "./drafts.js";
import { $, notify } from "./elements.js";
import { exportAll, importFiles, opened } from "./library.js";
import { listedOnes, look, search } from "./list.js";
import { atEnd, showTold } from "./log.js";
import { page } from "./page.js";
import { closeSettings, openSettings, set, settings, settingsAreOpen } from "./settings.js";
import { count } from "./tools.js";

const scroll = $("scroll");

const THEMES = { auto: "light", light: "dark", dark: "auto" };

/** What the buttons show of the state. */
export function buttons() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  $("theme").title = `Colours: ${settings.theme}`;
  $("think").setAttribute("aria-pressed", settings.think);
  $("attach").title = `Add ${page.seeing ? "pictures and " : ""}text files; or paste or drop them`;
  $("example").hidden = !page.seeing;
  $("schema-chip").hidden = !settings.schema.trim();
  $("schema-chip").setAttribute("aria-pressed", settings.useSchema);
  $("tools-chip").hidden = !count();
  $("tools-chip").setAttribute("aria-pressed", settings.useTools);
  const send = $("send");
  send.disabled = !busy() && (unread > 0 || !(input.value.trim() || draft.given.length));
  send.title = busy() ? "Stop (Esc)" : "Send (Enter)";
  send.setAttribute("aria-label", busy() ? "Stop" : "Send");
  send.querySelector("use").setAttribute("href", busy() ? "#i-stop" : "#i-send");
  $("log").classList.toggle("busy", busy());
  showTold();
}

function toggleSide() {
  document.body.classList.toggle(matchMedia("(max-width: 48rem)").matches ? "open-side" : "narrow-side");
}

function findIt() {
  if (!$("side").checkVisibility({ visibilityProperty: true })) toggleSide();
  search.select();
}

function step(by) {
  const ones = listedOnes();
  const next = ones[ones.findIndex(({ id }) => id === page.current?.id) + by];
  if (next) page.choose(next);
}

const KEYS = {
  KeyN: () => page.choose(null),
  KeyT: () => $("think").click(),
  KeyS: () => (settingsAreOpen() ? closeSettings() : openSettings()),
  KeyC: toggleSide,
  KeyK: findIt,
  ArrowUp: () => step(-1),
  ArrowDown: () => step(1),
};

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (document.body.classList.contains("open-side")) toggleSide();
    else if (draft.editing) cancelEdit();
    else stop();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code]) {
    event.preventDefault();
    KEYS[event.code]();
  }
});

const touch = matchMedia("(pointer: coarse) and (hover: none)"); // its keyboard has no Shift+Enter

input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !touch.matches && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !event.altKey && !input.value && !draft.editing) {
    const last = page.current?.branch.findLast(({ role }) => role === "user");
    if (!last) return;
    event.preventDefault();
    edit(last);
  }
});
input.addEventListener("input", () => {
  draft.text = input.value;
  keepDraft(page.current, draft);
  buttons();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy()) stop();
  else send();
});
search.addEventListener("input", look);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && listedOnes().length) page.choose(listedOnes()[0]);
  else if (event.key === "Escape" && search.value) search.value = "";
  else return;
  look();
  event.preventDefault();
  event.stopPropagation();
});
$("export").addEventListener("click", exportAll);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async ({ target }) => {
  const files = [...target.files];
  target.value = ""; // the same may be chosen again
  await importFiles(files);
});
$("new").addEventListener("click", () => page.choose(null));
$("end").addEventListener("click", () => { scroll.scrollTop = scroll.scrollHeight; });
scroll.addEventListener("scroll", () => { $("end").hidden = atEnd(); });
$("menu").addEventListener("click", toggleSide);
$("shade").addEventListener("click", toggleSide);
$("tune").addEventListener("click", () => openSettings());
$("own").addEventListener("click", () => openSettings());
$("theme").addEventListener("click", () => { set({ theme: THEMES[settings.theme] }); buttons(); });
$("think").addEventListener("click", () => { set({ think: !settings.think }); buttons(); });
$("schema-chip").addEventListener("click", () => { set({ useSchema: !settings.useSchema }); buttons(); });
$("tools-chip").addEventListener("click", () => { set({ useTools: !settings.useTools }); buttons(); });
$("cancel-edit").addEventListener("click", cancelEdit);
$("notice-close").addEventListener("click", () => notify(""));
addEventListener("beforeunload", (event) => {
  if ([...opened.values()].some(({ unsaved }) => unsaved)) event.preventDefault();
});

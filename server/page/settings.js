// The settings of this browser, in localStorage, and the dialog that changes them.

import { $ } from "./elements.js";

const DEFAULTS = {
  system: "", temperature: "", top_p: "", top_k: "", max_tokens: "", schema: "", key: "",
  useSchema: true, think: true, theme: "auto", current: null,
};
const NAMED = ["system", "temperature", "top_p", "top_k", "max_tokens", "schema", "key"];

function stored() {
  try {
    return JSON.parse(localStorage.getItem("qwen-serve")) ?? {};
  } catch {
    return {};
  }
}

export const settings = { ...DEFAULTS, ...stored() };

/** Changes settings, for good; those that another tab has changed stay as that tab left them. */
export function set(changes) {
  Object.assign(settings, stored(), changes);
  try {
    localStorage.setItem("qwen-serve", JSON.stringify(settings));
  } catch { /* no room: they hold until the page is left */ }
}

const dialog = $("settings");
export const fields = dialog.querySelector("form").elements;

export const settingsAreOpen = () => dialog.open;

export function openSettings(focused) {
  for (const name of NAMED) fields[name].value = settings[name];
  checkSchema();
  if (!dialog.open) dialog.showModal();
  (focused ?? fields.system).focus();
}

export const closeSettings = () => dialog.close();

function checkSchema() {
  let wrong = "";
  try {
    if (settings.schema.trim()) JSON.parse(settings.schema);
  } catch (error) {
    wrong = error.message;
  }
  $("schema-error").textContent = wrong;
  fields.schema.classList.toggle("bad", Boolean(wrong));
}

/** Opens the dialog at the key, with what the server said about it. */
export function askForKey(message) {
  $("key-error").textContent = message;
  if (!dialog.open) openSettings(fields.key);
}

/** Calls `changed` when a setting has changed, here or in another tab, and `closed` when the dialog has closed. */
export function watchSettings(changed, closed) {
  dialog.addEventListener("input", ({ target }) => {
    if (target.name === "key") $("key-error").textContent = "";
    if (target.validity.valid) set({ [target.name]: target.value });
    if (target.name === "schema") {
      set({ useSchema: true });
      checkSchema();
    }
    changed();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog && event.offsetX < 0) dialog.close(); });
  dialog.addEventListener("close", closed);
  addEventListener("storage", () => { Object.assign(settings, stored()); changed(); });
}

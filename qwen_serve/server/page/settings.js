// The settings of this browser, in localStorage, and the dialog that changes them.

import { $, element } from "./elements.js";

const whole = { step: 1 }, any = { step: "any" };

/** Numbers of a request, by their fields: what each is called, and what it may be. */
export const SAMPLERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, ...any },
  { name: "top_p", label: "Top p", min: 0, max: 1, ...any },
  { name: "top_k", label: "Top k", min: -1, ...whole },
  { name: "max_tokens", label: "Max tokens", min: 1, ...whole, placeholder: "what fits" },
  { name: "min_p", label: "Min p", min: 0, max: 1, ...any },
  { name: "typical_p", label: "Typical p", min: 0, max: 1, ...any },
  { name: "top_n_sigma", label: "Top n sigma", min: -1, max: 1000, ...any },
  { name: "seed", label: "Seed", ...whole, placeholder: "random" },
  { name: "presence_penalty", label: "Presence penalty", min: -100, max: 100, ...any },
  { name: "frequency_penalty", label: "Frequency penalty", min: -100, max: 100, ...any },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, ...any },
  { name: "repeat_last_n", label: "Penalties look back", min: -1, ...whole, placeholder: "on all" },
  { name: "dynatemp_range", label: "Dynamic temp. ±", min: 0, max: 100, ...any },
  { name: "dynatemp_exponent", label: "… its exponent", min: 0, max: 100, ...any },
  { name: "xtc_probability", label: "XTC probability", min: 0, max: 1, ...any },
  { name: "xtc_threshold", label: "XTC threshold", min: 0, max: 1, ...any },
  { name: "dry_multiplier", label: "DRY multiplier", min: 0, max: 1000, ...any },
  { name: "dry_base", label: "DRY base", min: 1, max: 1000, ...any },
  { name: "dry_allowed_length", label: "DRY allowed length", min: 0, ...whole },
  { name: "dry_penalty_last_n", label: "DRY looks back", min: -1, ...whole },
  { name: "mirostat", label: "Mirostat (0, 1, 2)", min: 0, max: 2, ...whole },
  { name: "mirostat_tau", label: "Mirostat tau", min: 0, max: 100, ...any },
  { name: "mirostat_eta", label: "Mirostat eta", min: 0, max: 100, ...any },
  { name: "min_keep", label: "Keep at least", min: 0, ...whole },
];
const SHOWN = 4; // of them without unfolding the others

const NUMBERS = SAMPLERS.map(({ name }) => name);
const NAMED = ["system", ...NUMBERS, "schema", "key"];
const DEFAULTS = {
  ...Object.fromEntries(NAMED.map((name) => [name, ""])),
  useSchema: true, think: true, theme: "auto", current: null,
};

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
SAMPLERS.forEach(({ label, ...attributes }, index) => {
  const field = element("label", "", label);
  field.append(Object.assign(element("input"), { type: "number", placeholder: "model's", ...attributes }));
  $(index < SHOWN ? "samplers" : "more-samplers").append(field);
});
export const fields = dialog.querySelector("form").elements;

export const settingsAreOpen = () => dialog.open;

export function openSettings(focused) {
  for (const name of NAMED) fields[name].value = settings[name];
  $("more").open ||= NUMBERS.slice(SHOWN).some((name) => settings[name] !== "");
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

/** Shows what there is to know of the server, as `[name, value]`. */
export function showFacts(facts) {
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
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
  $("reset").addEventListener("click", () => {
    set(Object.fromEntries(NUMBERS.map((name) => [name, ""])));
    for (const name of NUMBERS) fields[name].value = "";
    changed();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog && event.offsetX < 0) dialog.close(); });
  dialog.addEventListener("close", closed);
  addEventListener("storage", () => { Object.assign(settings, stored()); changed(); });
}

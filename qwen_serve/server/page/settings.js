// The settings of this browser, in localStorage, those that a conversation has of its own, and the dialog that changes both.

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
/** The names that the server's defaults have, where they differ. */
const SPELT = { typical_p: "typ_p", repetition_penalty: "repeat_penalty" };

const NUMBERS = SAMPLERS.map(({ name }) => name);
const THINKING = ["reasoning_effort", "thinking_budget"];
/** What a conversation may have of its own. */
export const OWN = ["system", ...THINKING, ...NUMBERS];
const NAMED = [...OWN, "schema", "key"];
const DEFAULTS = {
  ...Object.fromEntries(NAMED.map((name) => [name, ""])),
  useSchema: true, think: true, theme: "auto", current: null,
  useTools: true, javascript: false, mcp: [], // of each MCP server `{ url, key }`
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

let own = {}, keepOwn = () => {}; // of the conversation that is shown
let defaults = {}; // the model's, with thinking and without: `{ true: {…}, false: {…} }`

/** Says which settings the conversation that is shown has of its own; `keep` is called with them when they change. */
export function showOwn(values, keep) {
  [own, keepOwn] = [values, keep];
  if (dialog.open) fill();
}

/** What holds for the conversation that is shown. */
export const effective = () => ({ ...settings, ...own });

/** What is said of a conversation on it: its system prompt, and numbers that are not the model's. */
export function told() {
  const all = effective();
  const numbers = SAMPLERS.filter(({ name }) => all[name] !== "").map(({ name, label }) => `${label.toLowerCase()} ${all[name]}`);
  const effort = all.think && all.reasoning_effort ? [`effort ${all.reasoning_effort}`] : [];
  const budget = all.think && all.thinking_budget !== "" ? [`thinking budget ${all.thinking_budget}`] : [];
  return { system: all.system.trim(), numbers: [...effort, ...budget, ...numbers].join(", ") };
}

/** Takes the model's own numbers, which the fields show where they are empty. */
export function showDefaults({ params = {}, thinking_params: thinking = params }) {
  defaults = { true: thinking, false: params };
  if (dialog.open) fill();
}

const dialog = $("settings");
const forOne = () => fields.scope.value === "own";

function change(changes) {
  if (!forOne()) return set(changes);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "") delete own[name];
    else own[name] = value;
  }
  keepOwn(own);
}

/** Shows the values of all conversations, or of the one that is shown, and what holds where a field is empty. */
function fill() {
  const shown = forOne() ? own : settings;
  for (const name of NAMED) fields[name].value = (OWN.includes(name) ? shown : settings)[name] ?? "";
  const model = defaults[settings.think] ?? {};
  for (const { name, placeholder = "model's" } of SAMPLERS) {
    const given = placeholder === "model's" ? model[SPELT[name] ?? name] : undefined;
    const general = forOne() && settings[name] !== "" ? settings[name] : undefined;
    fields[name].placeholder = general ?? (typeof given === "number" ? String(Number(given.toPrecision(4))) : placeholder);
  }
  fields.system.placeholder = (forOne() && settings.system.trim()) || "None";
}

SAMPLERS.forEach(({ label, ...attributes }, index) => {
  const field = element("label", "", label);
  field.append(Object.assign(element("input"), { type: "number", placeholder: "model's", ...attributes }));
  $(index < SHOWN ? "samplers" : "more-samplers").append(field);
});
export const fields = dialog.querySelector("form").elements;

export const settingsAreOpen = () => dialog.open;

export function openSettings(focused) {
  fields.scope.value = Object.keys(own).length ? "own" : "all";
  fill();
  $("more").open ||= NUMBERS.slice(SHOWN).some((name) => effective()[name] !== "");
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
    if (!target.name) return; // it is not a setting of requests
    if (target.name === "scope") return fill();
    if (target.name === "key") $("key-error").textContent = "";
    if (target.validity.valid) (OWN.includes(target.name) ? change : set)({ [target.name]: target.value });
    if (target.name === "schema") {
      set({ useSchema: true });
      checkSchema();
    }
    changed();
  });
  $("reset").addEventListener("click", () => {
    change(Object.fromEntries([...THINKING, ...NUMBERS].map((name) => [name, ""])));
    fill();
    changed();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog && event.offsetX < 0) dialog.close(); });
  dialog.addEventListener("close", closed);
  addEventListener("storage", () => { Object.assign(settings, stored()); changed(); });
}

// What the page knows of the server.

import { $ } from "./elements.js";
import { showUse } from "./log.js";
import { page } from "./page.js";
import { askForKey, settings, showDefaults, showFacts } from "./settings.js";
import { model, props } from "./stream.js";
import { allow } from "./tools.js";

let retry = 0;

function factsOf({ id, max_model_len: context, meta }, { total_slots: slots, modalities, build_info: build }) {
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
  const [giga, mega] = [1e9, 1e6];
  const parameters = meta.n_params < giga ? `${number(meta.n_params / mega)} million` : `${number(meta.n_params / giga)} billion`;
  return [
    ["Model", id],
    ["Kind", meta.description],
    ["Parameters", parameters],
    ["Size", `${number(meta.size / (meta.size < 2 ** 30 ? 2 ** 20 : 2 ** 30))} ${meta.size < 2 ** 30 ? "MiB" : "GiB"}`],
    ["Context", `${number(context)} of ${number(meta.n_ctx_train)} tokens`],
    ["At once", `${slots} answers`],
    ["Sees pictures", modalities.vision ? "yes" : "no"],
    ["Server", build],
  ];
}

/** Shows the model's name; asks again while it is loading. */
export async function identify() {
  clearTimeout(retry);
  const status = $("status");
  try {
    const card = await model(settings.key);
    const about = await props(settings.key);
    page.seeing = about.modalities.vision;
    page.fits = card.max_model_len;
    page.limits = about.limits;
    allow(about.mcp_origins);
    showDefaults(about.default_generation_settings);
    showFacts(factsOf(card, about));
    $("model").textContent = card.id;
    $("about").textContent = `${card.id} · up to ${card.max_model_len.toLocaleString("en")} tokens`;
    status.textContent = "";
    showUse();
    page.buttons();
  } catch (error) {
    status.textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    if (error.status === 401) askForKey(error.message);
    else retry = setTimeout(identify, 1000);
  }
}

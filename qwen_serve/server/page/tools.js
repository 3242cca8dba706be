// The tools that the model is offered: the sandbox's, and those of the MCP servers that the user has added.

import { $, element, iconButton } from "./elements.js";
import { McpServer } from "./mcp.js";
import { TOOL, runCode } from "./sandbox.js";
import { set, settings } from "./settings.js";

const CONNECT_MS = 15_000;

let catalogue = new Map(); // by the name the model knows: `{ tool, run(arguments, signal), from }`
let asking = null; // what they have; null before it was asked
let allowed = []; // origins that the server calls
let changed = () => {};

const entry = (tool, from, run) => ({ tool, from, run });

/** A name that requests may have, and that no other tool has. */
function nameFor(name, taken) {
  const plain = name.replace(/[^A-Za-z0-9_-]/g, "_").slice(0, 60) || "tool";
  for (let count = 1, one = plain; ; one = `${plain}_${count += 1}`) if (!taken.has(one)) return one;
}

/** Asks the MCP servers what they have, and says it in the settings. */
async function gather() {
  const found = new Map();
  if (settings.javascript) found.set(TOOL.name, entry(TOOL, "this browser", ({ code }, signal) => runCode(String(code ?? ""), signal)));
  const said = new Map();
  const lists = await Promise.all(settings.mcp.map(async (one) => {
    const server = new McpServer(one, () => settings.key);
    try {
      const tools = await server.tools(AbortSignal.timeout(CONNECT_MS));
      said.set(one.url, `${tools.length} tools: ${tools.map(({ name }) => name).join(", ")}`);
      return { server, tools };
    } catch (error) {
      said.set(one.url, error.name === "TimeoutError" ? "It does not answer." : error.message);
      return { server, tools: [] };
    }
  }));
  for (const { server, tools } of lists) {
    for (const tool of tools) {
      const name = nameFor(tool.name, found);
      found.set(name, entry({ ...tool, name }, server.url, (given, signal) => server.call(tool.name, given, signal)));
    }
  }
  catalogue = found;
  showServers(said);
  changed();
}

const renew = () => (asking = gather());
const ready = () => asking ?? renew();

/** The tools of a request, once the servers have answered; none where they are switched off. */
export async function offered() {
  await ready();
  return settings.useTools ? [...catalogue.values()].map(({ tool }) => ({ type: "function", function: tool })) : [];
}

export const count = () => catalogue.size;
export const origin = (name) => catalogue.get(name)?.from;

/** Runs a call: `{ failed, text }`. It throws nothing: what went wrong is a result that the model is told. */
export async function runCall({ name, arguments: text }, signal) {
  await ready();
  const known = catalogue.get(name);
  if (!known) return { failed: true, text: `There is no tool ${name}.` };
  try {
    return await known.run(text.trim() ? JSON.parse(text) : {}, signal);
  } catch (error) {
    return { failed: true, text: signal.aborted ? "The user stopped it." : String(error.message) };
  }
}

// --- the settings ---------------------------------------------------------------------------------------------

function showServers(said = new Map()) {
  $("javascript").checked = settings.javascript;
  $("mcp-servers").replaceChildren(...settings.mcp.map((one) => {
    const row = element("li");
    const text = element("span", "", one.url);
    text.append(element("small", "quiet", said.get(one.url) ?? "…"));
    row.append(text, iconButton("close", `Remove ${one.url}`, () => {
      set({ mcp: settings.mcp.filter(({ url }) => url !== one.url) });
      showServers();
      renew();
    }));
    return row;
  }));
  $("mcp-add").hidden = !allowed.length;
  $("mcp-off").hidden = Boolean(allowed.length);
  $("mcp-allowed").textContent = allowed.length ? `The server calls ${allowed.join(", ")}.` : "";
}

function add() {
  const [url, key] = [$("mcp-url"), $("mcp-key")];
  const error = $("mcp-error");
  const address = url.value.trim();
  if (!URL.canParse(address)) error.textContent = "Want an address such as http://127.0.0.1:3001/mcp.";
  else if (!allowed.some((one) => URL.canParse(one) && new URL(one).origin === new URL(address).origin)) error.textContent = "The server may not call it: --mcp-origins names those it may.";
  else {
    error.textContent = "";
    set({ mcp: [...settings.mcp.filter((one) => one.url !== address), { url: address, key: key.value.trim() }] });
    url.value = key.value = "";
    showServers();
    renew();
  }
}

/** Calls `handler` when there are other tools. */
export function watchTools(handler) {
  changed = handler;
  $("javascript").addEventListener("change", ({ target }) => { set({ javascript: target.checked, useTools: true }); renew(); });
  $("mcp-add-button").addEventListener("click", add);
  for (const id of ["mcp-url", "mcp-key"]) {
    $(id).addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      add();
    });
  }
}

/** Takes the origins that the server calls. */
export function allow(origins = []) {
  if (asking && String(origins) === String(allowed)) return;
  allowed = origins;
  showServers();
  renew();
}

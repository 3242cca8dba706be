// Small things that the page is made of.

export const $ = (id) => document.getElementById(id);

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Its text runs from right to left where it is Arabic, Hebrew or the like. */
export function inItsDirection(made) {
  made.dir = "auto";
  return made;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.append(document.createElementNS("http://www.w3.org/2000/svg", "use"));
  svg.firstChild.setAttribute("href", `#i-${name}`);
  return svg;
}

export function iconButton(name, label, action) {
  const button = element("button", "icon");
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(icon(name));
  button.addEventListener("click", action);
  return button;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure context: http:// on another machine
    const area = Object.assign(element("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.title;
  button.title = "Copied";
  button.classList.add("done");
  setTimeout(() => { button.title = before; button.classList.remove("done"); }, 1200);
}

/** Gives the browser a file to save. */
export function download(name, text, type = "text/plain") {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Says something above the composer until it is closed, with a button for what can be done about it. */
export function notify(text, label = "", action = null) {
  $("notice").hidden = !text;
  $("notice-text").textContent = text;
  const button = $("notice-action");
  button.hidden = !label;
  button.textContent = label;
  button.onclick = () => { notify(""); action(); };
  return button;
}

export const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`);

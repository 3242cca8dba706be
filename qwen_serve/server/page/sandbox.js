// A tool that runs JavaScript of the model: in a worker of a frame that has neither this page's origin nor a network.

import { element } from "./elements.js";

const MOST_MS = 10_000;

export const TOOL = {
  name: "run_javascript",
  description: "Runs JavaScript and returns the value of an expression, or what is returned and logged by statements. For arithmetic, "
    + "dates, sorting, text. There is no network, no DOM and no files. It must end within 10 seconds.",
  parameters: { type: "object", properties: { code: { type: "string", description: "an expression, or statements with return or console.log" } }, required: ["code"] },
};

/** Runs `code`: `{ failed, text }`. The frame is made anew each time, and taken away at its end, or on `signal`. */
export function runCode(code, signal) {
  return new Promise((resolve) => {
    const frame = element("iframe");
    frame.hidden = true;
    frame.title = "Sandbox";
    frame.setAttribute("sandbox", "allow-scripts");
    frame.src = "/page/sandbox.html";
    const end = (result) => {
      removeEventListener("message", hear);
      clearTimeout(timer);
      frame.remove();
      resolve(result);
    };
    const hear = ({ source, data }) => {
      if (source !== frame.contentWindow) return;
      if (data?.ready) frame.contentWindow.postMessage({ code }, "*");
      else end({ failed: data?.failed !== false, text: String(data?.text ?? "") });
    };
    const timer = setTimeout(() => end({ failed: true, text: `It did not end within ${MOST_MS / 1000} seconds.` }), MOST_MS);
    addEventListener("message", hear);
    signal.addEventListener("abort", () => end({ failed: true, text: "The user stopped it." }));
    document.body.append(frame);
  });
}

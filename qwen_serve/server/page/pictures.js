// What is attached to a message, and its pictures: from files to data URLs, as they are shown, and as they are sent.

import { $, element, iconButton, notify } from "./elements.js";
import { attachedFile, readText } from "./files.js";

const MOST = 16; // that the server reads of a request
const KINDS = ["image/jpeg", "image/png", "image/webp", "image/gif"]; // that it reads
const MAX_BYTES = 3 * 2 ** 20;
const MAX_PIXELS = 2 ** 22; // what the model looks at: 4,096 tokens of 32 x 32
const SMALLER = [20, 19, 18, 17, 16].map((power) => 2 ** power); // lengths of a data URL
const LEFT_OUT = "[A picture was here. It is left out, since the request has no room for it.]";

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A file as a data URL, made smaller only where it is too large. Throws where the browser cannot read it. */
async function read(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height)));
  if (scale === 1 && file.size <= MAX_BYTES && KINDS.includes(file.type)) return dataUrl(file);
  return drawn(bitmap, scale, 0.9);
}

/** The data URL of a picture as JPEG, `scale` times its size. */
async function drawn(bitmap, scale, quality) {
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.floor(side * scale)));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return dataUrl(await canvas.convertToBlob({ type: "image/jpeg", quality }));
}

/** A picture's data URL with at most `length` characters. */
async function smaller(url, length) {
  const [, type, data] = /^data:([^;]*);base64,(.*)$/s.exec(url);
  const bitmap = await createImageBitmap(new Blob([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], { type }));
  for (let scale = Math.min(1, Math.sqrt(length / url.length)); ; scale *= 0.8) {
    const made = await drawn(bitmap, scale, 0.85);
    if (made.length <= length) return made;
  }
}

/** Keeps a request within the server's `limits`: of its pictures, the oldest are sent smaller or left out. Says so. */
export async function keepWithin(body, { body_bytes: most, images }) {
  const parts = body.messages.flatMap(({ content }) => (Array.isArray(content) ? content : []));
  const all = parts.filter(({ type }) => type === "image_url");
  const leaveOut = (part) => {
    delete part.image_url;
    Object.assign(part, { type: "text", text: LEFT_OUT });
  };
  const size = () => new Blob([JSON.stringify(body)]).size + 1024; // and what streaming adds
  const out = all.splice(0, Math.max(0, all.length - images));
  out.forEach(leaveOut);
  let over = size() - most, changed = 0;
  for (const length of SMALLER) {
    for (const { image_url: picture } of all) {
      if (over <= 0) break;
      if (picture.url.length <= length) continue;
      const made = await smaller(picture.url, length);
      over -= picture.url.length - made.length;
      picture.url = made;
      changed += 1;
    }
  }
  while (over > 0 && all.length) {
    over -= all[0].image_url.url.length;
    out.push(all[0]);
    leaveOut(all.shift());
  }
  if (out.length) notify(`The server reads ${images} pictures and ${most / 2 ** 20} MiB at a time: ${out.length} older ones were left out.`);
  else if (changed) notify(`The server reads ${most / 2 ** 20} MiB at a time: older pictures were sent smaller.`);
}

/** A picture to try: three red circles. With `question`, which asks for their number. */
export async function example() {
  const canvas = new OffscreenCanvas(112, 80);
  const context = canvas.getContext("2d");
  context.fillStyle = "rgb(200 215 230)";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "rgb(214 40 40)";
  for (const [x, y] of [[20, 20], [56, 60], [92, 20]]) {
    context.beginPath();
    context.arc(x, y, 10, 0, 2 * Math.PI);
    context.fill();
  }
  const file = new File([await canvas.convertToBlob({ type: "image/png" })], "circles.png", { type: "image/png" });
  return { file, question: "How many circles are there?" };
}

const isPicture = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml"; // which is text

/** Calls `add` with what each file is: a picture's data URL, or a text file. `room` says how many there are by then. */
export async function readAll(files, room, add) {
  for (const file of files) {
    if (room() >= MOST) return void notify(`A message has at most ${MOST} pictures and files.`);
    try {
      add(await (isPicture(file) ? read(file) : readText(file)));
    } catch (error) {
      notify(isPicture(file) ? `“${file.name}” is no picture that this browser can read.` : error.message);
    }
  }
}

/** Calls `take` with files that are chosen, pasted or dropped, pictures only where `sees` is true. */
export function watchFiles(sees, take) {
  const given = (all) => {
    const files = [...all].filter((file) => sees() || !isPicture(file));
    if (files.length < all.length) notify("This model sees no pictures.");
    if (files.length) take(files);
    return all.length > 0;
  };
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", ({ target }) => {
    given(target.files);
    target.value = ""; // the same may be chosen again
  });
  addEventListener("paste", (event) => {
    if (!event.target.closest("dialog") && given(event.clipboardData.files)) event.preventDefault();
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    addEventListener(kind, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // or the browser would show the file in place of the page
      document.body.classList.toggle("dropping", kind === "dragover");
      if (kind === "drop") given(event.dataTransfer.files);
    });
  }
}

function image(url, number) {
  const made = element("img");
  made.src = url;
  made.alt = `Picture ${number}`;
  return made;
}

/** Pictures of a message that was sent: each becomes large, and small again, when it is clicked. */
export function shown(urls) {
  const row = element("div", "pictures");
  row.append(...urls.map((url, index) => {
    const button = element("button", "picture");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.append(image(url, index + 1));
    button.addEventListener("click", () => button.setAttribute("aria-expanded", button.classList.toggle("large")));
    return button;
  }));
  return row;
}

/** Pictures and files that are going to be sent; `drop` is called with the index of one that is not, after all. */
export function attached(all, drop) {
  return all.map((url, index) => {
    if (url.name) return attachedFile(url, () => drop(index));
    const root = element("span", "picture");
    root.append(image(url, index + 1), iconButton("close", `Remove picture ${index + 1}`, () => drop(index)));
    return root;
  });
}

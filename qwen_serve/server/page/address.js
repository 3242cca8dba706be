// The page's address: which conversation it shows (`#ID`), and what it was opened to ask (`?q=`).

/** The id of the conversation that the address names, or null. */
export const addressed = () => decodeURIComponent(location.hash.slice(1)) || null;

/** Makes the address that of a conversation; null for a new one. */
export function showAddress(conversation) {
  const id = conversation?.id ?? null;
  if (id !== addressed()) history.pushState(null, "", id ? `#${encodeURIComponent(id)}` : location.pathname);
}

/** Calls `handler` with the id when the address is changed, by Back and Forward or by hand. */
export function whenAddressed(handler) {
  addEventListener("popstate", () => handler(addressed()));
}

/** The question the page was opened to ask, once: a reload does not ask again. */
export function asked() {
  const question = new URLSearchParams(location.search).get("q")?.trim();
  if (question) history.replaceState(null, "", location.pathname);
  return question;
}

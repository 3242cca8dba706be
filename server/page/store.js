// What this browser keeps: conversations in IndexedDB, settings in localStorage.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("qwen-serve", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function transact(mode, work) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("conversations", mode);
    const request = work(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** Every conversation, the latest first. */
export async function conversations() {
  const all = await transact("readonly", (store) => store.getAll());
  return all.sort((a, b) => b.changed - a.changed);
}

export const save = (conversation) => transact("readwrite", (store) => store.put(conversation));
export const remove = (id) => transact("readwrite", (store) => store.delete(id));

const DEFAULTS = {
  system: "", temperature: "", top_p: "", top_k: "", max_tokens: "", schema: "", key: "",
  useSchema: true, think: true, theme: "auto", current: null,
};

export const settings = { ...DEFAULTS, ...JSON.parse(localStorage.getItem("qwen-serve") ?? "{}") };

/** Changes settings, for good. */
export function set(changes) {
  Object.assign(settings, changes);
  localStorage.setItem("qwen-serve", JSON.stringify(settings));
}

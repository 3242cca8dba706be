// What this browser keeps in IndexedDB: conversations, and each message by itself. A tab writes only the messages that it
// made, so that it never writes over another tab's.

const STORES = ["conversations", "messages"];
const channel = new BroadcastChannel("qwen-serve");

let opened = null;
let blocked = () => {};

/** Calls `handler` when an older version of the page, in another tab, keeps this one from opening the database. */
export function whenBlocked(handler) {
  blocked = handler;
}

/** Calls `handler` with what another tab changed: `{ saved, messages, live }` or `{ removed }`, all of them ids. */
export function whenChanged(handler) {
  channel.onmessage = ({ data }) => handler(data);
}

function upgrade({ oldVersion, target: { result: database, transaction } }) {
  if (oldVersion < 1) database.createObjectStore("conversations", { keyPath: "id" });
  const store = database.createObjectStore("messages", { keyPath: "id" });
  store.createIndex("conversation", "conversation");
  // version 1 had a list of messages in each conversation: every one becomes the child of the one before
  transaction.objectStore("conversations").openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    const { messages = [], ...conversation } = cursor.value;
    let parent = null;
    messages.forEach(({ live, thinkingSince, ...message }, index) => {
      const id = `${conversation.id}/${index}`;
      store.put({ ...message, id, conversation: conversation.id, parent, created: index });
      parent = id;
    });
    cursor.update({ ...conversation, leaf: parent });
    cursor.continue();
  };
}

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("qwen-serve", 2);
    request.onupgradeneeded = upgrade;
    request.onblocked = () => blocked();
    request.onerror = () => { opened = null; reject(request.error); };
    request.onsuccess = () => {
      const database = request.result;
      database.onclose = () => { opened = null; };
      database.onversionchange = () => { database.close(); opened = null; }; // a newer page wants to open it
      resolve(database);
    };
  });
}

async function transact(mode, work) {
  const database = await (opened ??= open());
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORES, mode);
    let request;
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
    try {
      request = work(...STORES.map((name) => transaction.objectStore(name)), transaction);
    } catch (error) { // all or none
      reject(error);
      transaction.abort();
    }
  });
}

/** Every conversation without its messages, the latest first. */
export async function conversations() {
  const all = await transact("readonly", (store) => store.getAll());
  return all.sort((a, b) => b.changed - a.changed);
}

/** The messages of a conversation, in no order. */
export const messagesOf = (id) => transact("readonly", (_, store) => store.index("conversation").getAll(id));

/** The ids of conversations with a message that `matches`. */
export async function conversationsWith(matches) {
  const found = new Set();
  for (const message of await transact("readonly", (_, store) => store.getAll())) {
    if (matches(message)) found.add(message.conversation);
  }
  return found;
}

/** Saves a conversation's record and some of its messages, all or none; `live` is the message that still grows, `gone` the
 * ids of those that were taken out. */
export async function save(record, messages, live, gone = []) {
  await transact("readwrite", (records, store, transaction) => {
    records.put(record);
    for (const message of messages) store.put(message);
    for (const id of gone) store.delete(id);
    transaction.commit(); // not to wait for anything: the page may be closing
  });
  channel.postMessage({ saved: record.id, messages: messages.map(({ id }) => id), live, gone });
}

export async function remove(id) {
  await transact("readwrite", (records, store) => {
    records.delete(id);
    store.index("conversation").openKeyCursor(IDBKeyRange.only(id)).onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      store.delete(cursor.primaryKey);
      cursor.continue();
    };
  });
  channel.postMessage({ removed: id });
}

// A conversation: a tree of messages, one branch of which is shown. Asking anew adds a branch and takes nothing away.

export const newId = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

/** A title from a text. */
export const shortened = (text) => (text.length > 80 ? `${text.slice(0, 79).trimEnd()}…` : text);

export class Conversation {
  /** From what the store has of it; `leaf` is the id of the last message that is shown. */
  constructor({ id, title, changed, leaf, own = {} }, messages = []) {
    Object.assign(this, { id, title, changed, leaf, own });
    this.messages = new Map(messages.map((message) => [message.id, message]));
    this.unsaved = false; // whether something of it could not be saved
    this.deleted = false; // whether another tab has deleted it
    if (!this.messages.has(leaf)) this.leaf = this.#inOrder().at(-1)?.id ?? null;
  }

  /** `own` are the settings that are its own. */
  static begin(text, own) {
    return new Conversation({ id: newId(), title: shortened(text), changed: Date.now(), leaf: null, own });
  }

  get record() {
    const { id, title, changed, leaf, own } = this;
    return { id, title, changed, leaf, own };
  }

  #inOrder() {
    return [...this.messages.values()].sort((a, b) => a.created - b.created);
  }

  /** The messages from the first to the one with this id. */
  upTo(id) {
    const path = [];
    for (let message = this.messages.get(id); message; message = this.messages.get(message.parent)) path.unshift(message);
    return path;
  }

  get branch() {
    return this.upTo(this.leaf);
  }

  /** What was said in a message's place, itself included, the oldest first. */
  siblings({ parent }) {
    return this.#inOrder().filter((message) => message.parent === parent);
  }

  /** Adds a message behind the one with the id `parent` (null: a first one), and shows it. */
  add(parent, fields) {
    const latest = Math.max(0, ...[...this.messages.values()].map(({ created }) => created));
    const created = Math.max(Date.now(), latest + 1);
    const message = { id: newId(), conversation: this.id, parent, created, ...fields };
    this.messages.set(message.id, message);
    this.leaf = message.id;
    this.changed = Date.now();
    return message;
  }

  /** Shows a message and the latest that was said behind it. */
  show(message) {
    const all = this.#inOrder();
    for (let next = message; next; next = all.findLast(({ parent }) => parent === this.leaf)) this.leaf = next.id;
  }

  /** Takes one message out. What followed it follows what was before it; these messages are returned. */
  takeOut({ id, parent }) {
    const after = this.#inOrder().filter((message) => message.parent === id);
    for (const message of after) message.parent = parent;
    this.messages.delete(id);
    this.changed = Date.now();
    if (this.leaf === id) {
      const beside = this.#inOrder().findLast((message) => message.parent === parent) ?? this.messages.get(parent);
      this.leaf = null;
      if (beside) this.show(beside);
    }
    return after;
  }

  /** Undoes that. */
  putBack(message, after) {
    this.messages.set(message.id, message);
    for (const { id } of after) if (this.messages.has(id)) this.messages.get(id).parent = message.id;
    this.show(message);
    this.changed = Date.now();
  }

  /** Takes in messages that another tab has saved. */
  merge(messages) {
    for (const message of messages) {
      const known = this.messages.get(message.id);
      if (!known) this.messages.set(message.id, message);
      else {
        for (const name of Object.keys(known)) if (!(name in message)) delete known[name];
        Object.assign(known, message);
      }
    }
    if (this.messages.has(this.leaf)) this.show(this.messages.get(this.leaf));
  }
}

// What is shown and known of the server, for all parts of the page; `chat.js` says how it is drawn.

export const page = {
  current: null, // the conversation that is shown; null for a new one that has no message yet
  fresh: {}, // settings of its own that a new one will have
  seeing: false, // whether the model sees pictures
  fits: 0, // tokens of a conversation
  limits: null, // of a request: `{ body_bytes, images }`

  /** Draws all of it; at the end of the conversation, unless the reader looks elsewhere. */
  show(end = false) {},
  /** The same, at the end if the reader is there. */
  follow() {},
  list() {},
  buttons() {},
  /** Shows another conversation. */
  async choose(record) {},
};

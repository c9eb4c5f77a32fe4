// The messages of the open conversation, kept at the bottom while an answer grows unless one scrolls up.

import { byId } from "../parts/dom.js";
import { messageView } from "./message.js";

const NEAR = 48; // px from the bottom that count as being there

let views = new Map(); // message → its view

/** Shows a conversation whole; on: see message.js. */
export function show(conversation, answering, on) {
  const kept = views;
  views = new Map();
  for (const message of conversation.messages) {
    const view = kept.get(message) ?? messageView(message, on);
    view.update(message === answering);
    views.set(message, view);
  }
  const thread = byId("thread");
  thread.replaceChildren(...[...views.values()].map((view) => view.node));
  thread.setAttribute("aria-busy", String(Boolean(answering)));
  toBottom();
}

/** After a change of one message, at most once a frame. */
export function refresh(message, isAnswering) {
  const view = views.get(message);
  if (!view) return;
  const wasAtBottom = isAtBottom();
  view.update(isAnswering);
  if (wasAtBottom) toBottom();
}

function isAtBottom() {
  const scroller = byId("scroller");
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
}

function toBottom() {
  const scroller = byId("scroller");
  scroller.scrollTop = scroller.scrollHeight;
}

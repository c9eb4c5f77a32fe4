// The messages of the open conversation, kept at the bottom while an answer grows unless one scrolls up.

import { byId } from "../parts/dom.js";
import { messageView } from "./message.js";
import { markIn } from "./search.js";

const NEAR = 48; // px from the bottom that count as being there

let views = new Map(); // message → its view
let isAtBottom = true;

/** Keeps the end in sight when the thread grows or the window gets smaller, unless one has scrolled up. */
export function follow() {
  const scroller = byId("scroller");
  scroller.addEventListener("scroll", () => {
    isAtBottom = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
  });
  const observer = new ResizeObserver(() => isAtBottom && toBottom());
  for (const each of [scroller, byId("thread")]) observer.observe(each);
}

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
  views.get(message)?.update(isAnswering);
}

/** Marks what is searched for, and goes to the first of it if `goes`. */
export function mark(query, goes = false) {
  const first = markIn(byId("thread"), query);
  if (!first || !goes) return;
  const scroller = byId("scroller");
  const { top } = scroller.getBoundingClientRect();
  scroller.scrollTop += first.getBoundingClientRect().top - top - scroller.clientHeight / 3;
}

function toBottom() {
  const scroller = byId("scroller");
  scroller.scrollTop = scroller.scrollHeight;
  isAtBottom = true;
}

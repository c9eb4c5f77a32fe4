// One line at the bottom of the chat that says what happened, with a way back where there is one.

import { button, byId, el } from "./dom.js";

let timer;

/** action: {label, run}. Errors stay until the next notice or their cross. */
export function notice(text, { action, isError = false } = {}) {
  const box = byId("notice");
  clearTimeout(timer);
  const close = () => (box.hidden = true);
  const act = action && button(action.label, () => (close(), action.run()));
  box.className = isError ? "error" : "";
  box.replaceChildren(el("span", {}, text), ...(act ? [act] : []), button("Dismiss", close, { sign: "×" }));
  box.hidden = false;
  if (!isError) timer = setTimeout(close, action ? 10000 : 4000);
}

export const failed = (error) => notice(error.message, { isError: true });

// The field where questions are written. Enter sends, Shift-Enter is a new line.

import { byId } from "../parts/dom.js";

/** on: {send(text), stop()}. */
export function buildComposer(on) {
  const field = byId("question");
  const send = () => {
    if (!field.value.trim() || !byId("stop").hidden) return;
    const text = field.value;
    field.value = "";
    fit(field);
    on.send(text);
  };
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  field.addEventListener("input", () => fit(field));
  byId("stop").addEventListener("click", on.stop);
}

export function showRunning(isRunning) {
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
}

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

// Code with the name of its language and a button that copies it.

import { copied } from "./copy.js";
import { button, el } from "../parts/dom.js";

export function codeBlock(text, language = "") {
  const copy = button("Copy", () => copied(text, copy));
  return el(
    "div.code",
    {},
    el("div.code-head", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0" }, el("code", {}, text)),
  );
}

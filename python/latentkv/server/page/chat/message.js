// One message of a conversation as it is shown, and what can be done with it.

import { showChips } from "./chips.js";
import { codeBlock } from "../text/code_block.js";
import { copied } from "../text/copy.js";
import { button, el } from "../parts/dom.js";
import { update } from "../text/markdown.js";
import { integer, rate, tokens } from "../parts/units.js";

/** on: {edit(message, text, attachments), regenerate(message)}. Returns {node, update(isAnswering)}. */
export function messageView(message, on) {
  return message.role === "user" ? question(message, on) : answer(message, on);
}

function question(message, on) {
  const files = el("ul.chips", { "aria-label": "Attached files" });
  const text = el("div.text");
  const copy = button("Copy", () => copied(message.content, copy));
  const edit = button("Edit", () => editor(node, message, on));
  const foot = el("footer", {}, copy, edit);
  const node = el("article.question", { "aria-label": "Question" }, files, text, foot);
  function refresh() {
    showChips(files, message.attachments);
    text.textContent = message.content;
    text.hidden = copy.hidden = !message.content;
  }
  return { node, update: refresh };
}

/** The question as a field in its own place. Sending it drops what came after it. */
function editor(node, message, on) {
  const kept = [...node.childNodes];
  let { attachments = [] } = message;
  const files = el("ul.chips", { "aria-label": "Attached files" });
  const remove = (gone) => {
    attachments = attachments.filter((each) => each !== gone);
    showChips(files, attachments, remove);
    field.focus();
  };
  const rows = Math.min(12, message.content.split("\n").length + 1);
  const field = el("textarea", { "aria-label": "Question", rows });
  field.value = message.content;
  const cancel = () => {
    node.classList.remove("editing");
    node.replaceChildren(...kept);
  };
  const send = () => (field.value.trim() || attachments.length) && on.edit(message, field.value, attachments);
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
  });
  node.classList.add("editing");
  const foot = el("footer", {}, button("Send", send, { kind: "main" }), button("Cancel", cancel));
  showChips(files, attachments, remove);
  node.replaceChildren(files, field, foot);
  field.focus();
}

function answer(message, on) {
  const thoughts = el("div.text");
  const summary = el("summary");
  const thinking = el("details.thinking", {}, summary, thoughts);
  const text = el("div.text");
  const calls = el("div.calls");
  const wait = el("p.wait", {}, "…");
  const error = el("p.error", { role: "alert" });
  const copy = button("Copy", () => copied(message.content, copy));
  const foot = el("footer", {}, copy, button("Regenerate", () => on.regenerate(message)), el("span.numbers"));
  const node = el("article.answer", { "aria-label": "Answer" }, thinking, text, calls, wait, error, foot);

  function refresh(isAnswering) {
    thinking.hidden = !message.reasoning;
    summary.textContent = isAnswering && !message.content ? "Thinking…" : "Thoughts";
    update(thoughts, message.reasoning);
    update(text, message.content);
    calls.replaceChildren(...message.tool_calls.filter(Boolean).map(call));
    copy.hidden = !message.content;
    wait.hidden = !isAnswering || Boolean(message.content || message.reasoning || message.tool_calls.length);
    error.hidden = !message.error;
    error.textContent = message.error ?? "";
    foot.hidden = isAnswering;
    foot.lastChild.textContent = numbers(message);
    node.classList.toggle("answering", isAnswering);
  }
  return { node, update: refresh };
}

function call({ function: { name, arguments: given } }) {
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // arguments that still come
  }
  return codeBlock(shown, "json", `call of ${name}`);
}

/** "12 tokens · 84.9 tokens/s · 96 of 128 prompt tokens from the cache · stopped" */
function numbers({ usage, timings, finish }) {
  const told = [];
  if (usage) told.push(tokens(usage.completion_tokens));
  if (timings?.predicted_per_second) told.push(rate(timings.predicted_per_second));
  if (timings?.cached_n) {
    const { cached_n: cached, prompt_n: computed } = timings;
    told.push(`${integer(cached)} of ${integer(cached + computed)} prompt tokens from the cache`);
  }
  if (finish === "length") told.push("ended at its limit of tokens");
  if (finish === "stopped") told.push("stopped");
  return told.join(" · ");
}

// The field where questions are written, and the files attached to them. Enter sends, Shift-Enter is a new line.

import { byId } from "../parts/dom.js";
import { failed, notice } from "../parts/notice.js";
import { bytes } from "../parts/units.js";
import { MOST_OF_ALL, MOST_OF_ONE, isLong, pasted, read, sizeOf } from "./attachments.js";
import { showChips } from "./chips.js";

let attached = []; // [{name, text}] of the next question

/** on: {send(text, attachments), stop()}. */
export function buildComposer(on) {
  const field = byId("question");
  const send = () => {
    if (!(field.value.trim() || attached.length) || !byId("stop").hidden) return;
    const [text, attachments] = [field.value, attached];
    field.value = "";
    fit(field);
    attach([]);
    on.send(text, attachments);
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
  field.addEventListener("paste", onPaste);
  byId("stop").addEventListener("click", on.stop);
  buildAttaching();
}

export function showRunning(isRunning) {
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
}

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function buildAttaching() {
  const files = byId("attachments");
  byId("attach").title = `Attach text files, up to ${bytes(MOST_OF_ONE)} each`;
  byId("attach").addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    take([...files.files]);
    files.value = "";
  });
  const place = document.querySelector("main");
  const isOfFiles = (event) => event.dataTransfer?.types.includes("Files");
  // a browser would leave the page for a file that is dropped beside the chat
  for (const name of ["dragover", "drop"]) {
    addEventListener(name, (event) => isOfFiles(event) && event.preventDefault());
  }
  place.addEventListener("dragover", (event) => place.classList.toggle("dropping", isOfFiles(event)));
  place.addEventListener("dragleave", (event) => {
    if (!place.contains(event.relatedTarget)) place.classList.remove("dropping");
  });
  place.addEventListener("drop", (event) => {
    place.classList.remove("dropping");
    if (isOfFiles(event)) take([...event.dataTransfer.files]);
  });
}

/** Files and long texts become attachments; a short text is pasted as usual. */
function onPaste(event) {
  const { files } = event.clipboardData;
  const text = event.clipboardData.getData("text/plain");
  if (files.length && !text) {
    event.preventDefault();
    take([...files]);
  } else if (isLong(text)) {
    event.preventDefault();
    pasteLong(event.target, text);
  }
}

function pasteLong(field, text) {
  const attachment = pasted(text, attached);
  const intoField = () => {
    attach(attached.filter((each) => each !== attachment));
    field.focus();
    field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
    fit(field);
  };
  try {
    attach(within([...attached, attachment]));
  } catch (error) {
    failed(error);
    return;
  }
  const action = { label: "Put it into the field", run: intoField };
  notice("The pasted text became an attachment.", { action });
}

/** Attaches the files that are text, and says what is wrong with the others. */
async function take(files) {
  const refused = [];
  for (const file of files) {
    try {
      const attachment = await read(file);
      // the same file again replaces the old one
      const others = attached.filter((each) => each.name !== attachment.name);
      attach(within([...others, attachment]));
    } catch (error) {
      refused.push(error.message);
    }
  }
  byId("question").focus();
  if (refused.length) failed(new Error(refused.join(" ")));
}

function within(attachments) {
  const all = attachments.reduce((sum, each) => sum + sizeOf(each), 0);
  if (all <= MOST_OF_ALL) return attachments;
  const { name } = attachments.at(-1);
  throw new Error(`With ${name} the files have ${bytes(all)}; a question may take ${bytes(MOST_OF_ALL)} along.`);
}

function attach(attachments) {
  attached = attachments;
  showChips(byId("chips"), attached, (gone) => {
    attach(attached.filter((each) => each !== gone));
    byId("question").focus();
  });
}

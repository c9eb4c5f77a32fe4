// The page put together: which conversation is open, which answers run, and what every action does.

import { showSpeed } from "./panel/activity.js";
import { answer, blank } from "./chat/answer.js";
import { buildComposer, showRunning } from "./chat/composer.js";
import { download, list, searched, titleOf, upload } from "./chat/conversation_list.js";
import { byId } from "./parts/dom.js";
import { failed } from "./parts/notice.js";
import { buildSides, closeDrawer } from "./parts/sides.js";
import { look, openPanel } from "./panel/panel.js";
import { buildSearch } from "./chat/searching.js";
import * as settings from "./panel/settings.js";
import * as store from "./chat/store.js";
import * as thread from "./chat/thread.js";

const OPEN = "latentkv.open"; // the conversation that a reload shows again
const SAVE_EVERY = 1000; // ms, while an answer comes

const running = new Map(); // conversation id → {message, stop: AbortController}
let shown;

const onList = {
  choose(conversation, query) {
    show(conversation);
    closeDrawer();
    thread.mark(query, true);
  },
  changed: showList,
  removed(conversation) {
    running.get(conversation.id)?.stop.abort();
    if (conversation === shown) begin();
    showList();
  },
};

const onMessage = {
  edit(message, text, attachments) {
    cut(message);
    ask(text, attachments);
  },
  regenerate(message) {
    cut(message);
    run(shown);
  },
};

/** Drops a message of the open conversation and all after it. */
function cut(message) {
  running.get(shown.id)?.stop.abort();
  shown.messages.splice(shown.messages.indexOf(message));
}

function ask(text, attachments) {
  const files = attachments.length ? { attachments } : {};
  shown.messages.push({ role: "user", content: text, ...files });
  shown.title ||= titled(text.trim() || attachments[0].name);
  run(shown);
}

/** The question's first line, cut after a word. */
function titled(text) {
  const line = text.trim().split("\n")[0];
  return line.length <= 60 ? line : `${line.slice(0, 60).replace(/\s+\S*$/, "")}…`;
}

async function run(conversation) {
  const message = blank();
  const stop = new AbortController();
  conversation.messages.push(message);
  conversation.changed = Date.now();
  running.set(conversation.id, { message, stop });
  keep(conversation);
  show(conversation);
  say("Answering");
  look();
  const changed = paced(conversation, message);
  try {
    await answer(conversation, settings.current().sampling, message, stop.signal, changed);
    say("The answer is complete");
  } catch (error) {
    if (stop.signal.aborted) message.finish = "stopped";
    else message.error = error.message;
    say(message.error ?? "Stopped");
  }
  ended(conversation, message);
}

function ended(conversation, message) {
  if (running.get(conversation.id)?.message === message) running.delete(conversation.id);
  const isKept = store.find(conversation.id) === conversation && conversation.messages.includes(message);
  if (isKept) keep(conversation);
  if (conversation === shown) {
    thread.refresh(message, false);
    showState();
  }
  showList();
  look();
}

/** A change is drawn at the next frame and kept after a second, however many come. */
function paced(conversation, message) {
  let isDue = false;
  let kept = Date.now();
  return () => {
    if (!isDue) {
      isDue = true;
      requestAnimationFrame(() => {
        isDue = false;
        if (running.get(conversation.id)?.message === message) thread.refresh(message, true);
      });
    }
    if (Date.now() - kept > SAVE_EVERY) {
      kept = Date.now();
      keep(conversation);
    }
  };
}

function keep(conversation) {
  try {
    store.save(conversation);
  } catch (error) {
    failed(error);
  }
}

function begin() {
  show(store.create(settings.current().system));
}

function show(conversation) {
  shown = conversation;
  sessionStorage.setItem(OPEN, conversation.id);
  byId("welcome").hidden = conversation.messages.length > 0;
  byId("heading").textContent = titleOf(conversation);
  settings.showSystem(conversation.system);
  thread.show(conversation, running.get(conversation.id)?.message, onMessage);
  showState();
  showList();
}

function showState() {
  const isRunning = running.has(shown.id);
  showRunning(isRunning);
  byId("thread").setAttribute("aria-busy", String(isRunning));
  showSpeed(shown.messages.findLast((message) => message.timings));
}

function showList() {
  list(shown, (id) => running.has(id), onList);
  byId("heading").textContent = titleOf(shown);
}

const say = (text) => (byId("said").textContent = text);

function stop() {
  running.get(shown.id)?.stop.abort();
}

function onEscape(event) {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (!closeDrawer()) stop();
}

function build() {
  store.open();
  store.follow(
    (id) => running.has(id),
    (id) => (id === shown.id ? show(store.find(id) ?? store.create(settings.current().system)) : showList()),
  );
  settings.build((system) => {
    shown.system = system;
    if (shown.messages.length) keep(shown);
  });
  buildComposer({ send: ask, stop: () => (stop(), byId("question").focus()) });
  buildSides();
  thread.follow();
  buildSearch({
    changed: () => (showList(), thread.mark(searched())),
    left: () => (closeDrawer(), byId("question").focus()),
  });
  byId("attachment-close").addEventListener("click", () => byId("attachment").close());
  document.addEventListener("keydown", onEscape);
  addEventListener("pagehide", () => {
    for (const each of running.values()) each.message.finish = "stopped";
    for (const id of running.keys()) if (store.find(id)) keep(store.find(id));
  });
  byId("new").addEventListener("click", () => {
    begin();
    closeDrawer();
    byId("question").focus();
  });
  byId("export").addEventListener("click", () => download(store.all()));
  byId("import").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", ({ target }) => {
    if (target.files[0]) upload(target.files[0], onList);
    target.value = "";
  });
  const last = store.find(sessionStorage.getItem(OPEN));
  if (last) show(last);
  else begin();
}

build();
openPanel({
  busy: () => running.size > 0,
  opened: (props) => settings.showDefaults(props.default_generation_settings.params),
});

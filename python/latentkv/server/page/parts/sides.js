// The list at the left and the panel at the right. On wide screens they are columns, and the panel stays open or
// closed as it was left. On narrow screens they are drawers over the chat. Each tab of the panel has a button.

import { byId } from "./dom.js";

const KEPT = "latentkv.panel";
const WIDE = { list: matchMedia("(min-width: 48.01rem)"), panel: matchMedia("(min-width: 74.01rem)") };
const OPENERS = { cache: "show-cache", settings: "show-settings" };

let drawer; // {side, opener} of the one that is open

export function buildSides() {
  byId("show-list").addEventListener("click", ({ currentTarget }) => openDrawer("list", currentTarget));
  for (const [tab, id] of Object.entries(OPENERS)) byId(id).addEventListener("click", () => toggle(tab));
  byId("scrim").addEventListener("click", closeDrawer);
  for (const each of document.querySelectorAll(".close-side")) each.addEventListener("click", close);
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", ({ key }) => {
      if (key !== "ArrowLeft" && key !== "ArrowRight") return;
      const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
      choose(other.getAttribute("aria-controls"));
      other.focus();
    });
  }
  WIDE.panel.addEventListener("change", closeDrawer);
  WIDE.list.addEventListener("change", closeDrawer);
  setColumn(localStorage.getItem(KEPT) === "open");
}

/** Opens or closes the panel's column, unless the reader has done so before. */
export function openByDefault(isOpen) {
  if (localStorage.getItem(KEPT) === null) setColumn(isOpen);
}

/** Opens a side if it is a drawer; a column is there anyway. */
export function openSide(side) {
  if (!WIDE[side].matches && drawer?.side !== side) openDrawer(side, document.activeElement);
}

/** Whether a drawer was open. */
export function closeDrawer() {
  if (!drawer) return false;
  const { opener } = drawer;
  drawer = undefined;
  delete document.body.dataset.drawer;
  tell();
  opener.focus();
  return true;
}

function close() {
  if (closeDrawer()) return;
  keep(false);
  byId(OPENERS[chosen()]).focus();
}

function toggle(tab) {
  const wasShown = isPanelShown() && chosen() === tab;
  choose(tab);
  if (!WIDE.panel.matches) openDrawer("panel", byId(OPENERS[tab]));
  else keep(!wasShown);
}

function keep(isOpen) {
  setColumn(isOpen);
  try {
    localStorage.setItem(KEPT, isOpen ? "open" : "closed");
  } catch {
    // it counts until the page is left
  }
}

function setColumn(isOpen) {
  document.body.classList.toggle("with-panel", isOpen);
  tell();
}

function openDrawer(side, opener) {
  drawer = { side, opener };
  document.body.dataset.drawer = side;
  tell();
  const first = side === "panel" ? byId(`tab-${chosen()}`) : byId(side).querySelector("button");
  first.focus();
}

function isPanelShown() {
  return WIDE.panel.matches ? document.body.classList.contains("with-panel") : drawer?.side === "panel";
}

const chosen = () => (byId("settings").hidden ? "cache" : "settings");

function choose(chosenTab) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const name = tab.getAttribute("aria-controls");
    tab.setAttribute("aria-selected", String(name === chosenTab));
    tab.tabIndex = name === chosenTab ? 0 : -1;
    byId(name).hidden = name !== chosenTab;
  }
  tell();
}

/** Sets aria-expanded of every button that opens something. */
function tell() {
  byId("show-list").setAttribute("aria-expanded", String(drawer?.side === "list"));
  for (const [tab, id] of Object.entries(OPENERS)) {
    byId(id).setAttribute("aria-expanded", String(isPanelShown() && chosen() === tab));
  }
}

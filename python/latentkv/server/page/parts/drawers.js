// On narrow screens the two sides are drawers over the chat; the panel's two tabs.

import { byId } from "./dom.js";

const SIDES = { list: "show-list", panel: "show-panel" };

export function buildDrawers() {
  for (const [side, id] of Object.entries(SIDES)) byId(id).addEventListener("click", () => open(side));
  const closers = [byId("scrim"), ...document.querySelectorAll(".close-drawer")];
  for (const each of closers) each.addEventListener("click", closeDrawer);
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tabs, tab));
    tab.addEventListener("keydown", ({ key }) => {
      if (key !== "ArrowLeft" && key !== "ArrowRight") return;
      const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
      choose(tabs, other);
      other.focus();
    });
  }
}

/** Whether one was open. */
export function closeDrawer() {
  const side = document.body.dataset.drawer;
  delete document.body.dataset.drawer;
  for (const id of Object.values(SIDES)) byId(id).setAttribute("aria-expanded", "false");
  if (side) byId(SIDES[side]).focus();
  return Boolean(side);
}

function open(side) {
  document.body.dataset.drawer = side;
  byId(SIDES[side]).setAttribute("aria-expanded", "true");
  byId(side).querySelector("button, [tabindex]")?.focus();
}

function choose(tabs, chosen) {
  for (const tab of tabs) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isChosen;
  }
}

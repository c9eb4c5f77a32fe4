// The API key: asked for when the server wants one, kept until the tab closes.

import { byId } from "../parts/dom.js";

const KEPT = "latentkv.key";
let asking = null;

export const heldKey = () => sessionStorage.getItem(KEPT);

/** Resolves to whether there is another key than `refused` to try. Several callers share one question. */
export function askKey(refused) {
  if (heldKey() !== refused) return Promise.resolve(true);
  asking ??= question(refused).finally(() => (asking = null));
  return asking;
}

function question(refused) {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  byId("key-refused").hidden = !refused;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const form = dialog.querySelector("form");
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEPT, field.value.trim());
      dialog.close("given");
    };
    byId("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue === "given");
  });
}

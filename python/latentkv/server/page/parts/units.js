// Numbers as people read them.

const STEPS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** 42051328 → "40.1 MiB": one decimal from KiB up. */
export function bytes(count) {
  let step = 0;
  while (count >= 1024 && step < STEPS.length - 1) {
    count /= 1024;
    step++;
  }
  return step ? `${count.toFixed(1)} ${STEPS[step]}` : `${Math.round(count)} bytes`;
}

export const integer = (count) => Math.round(count).toLocaleString("en-US");

export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}\u00a0%` : "–");

/** Tokens per second; "–" where nothing was computed. */
export function rate(perSecond) {
  return perSecond ? `${perSecond.toFixed(perSecond < 100 ? 1 : 0)} tokens/s` : "–";
}

/** 137169600 → "137 M" */
export function parameters(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} B`;
  return count >= 1e6 ? `${Math.round(count / 1e6)} M` : `${Math.round(count / 1e3)} K`;
}

/** The text in one line, whatever the width. */
export const unbroken = (text) => text.replaceAll(" ", "\u00a0");

export const tokens = (count) => (count === 1 ? "1 token" : `${integer(count)} tokens`);

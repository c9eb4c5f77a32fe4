// Turns {text, language} into highlight.js's HTML, or undefined for a language that it does not know.

import highlight from "../vendor/highlight/highlight.min.js";

onmessage = ({ data: { text, language } }) => {
  const isKnown = highlight.getLanguage(language);
  postMessage(isKnown ? highlight.highlight(text, { language, ignoreIllegals: true }).value : undefined);
};

postMessage("ready");

// {text, language} to the HTML of its colours; undefined for a language that is not known.

import highlight from "../vendor/highlight/highlight.min.js";

onmessage = ({ data: { text, language } }) => {
  const isKnown = highlight.getLanguage(language);
  postMessage(isKnown ? highlight.highlight(text, { language, ignoreIllegals: true }).value : undefined);
};

postMessage("ready");

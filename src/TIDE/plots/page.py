"""The page of a report: its style sheet, and its script for mouse, touch and keyboard. `report.py` fills it.

The panel with a token's details never covers the answer. On a wide screen it sits beside the answer and stays in view; on a
narrow one it sits at the bottom, and the page scrolls above it. Its height does not depend on its content, so hovering over a
token moves nothing.

Text stays readable on every colour, in light and dark mode: `--shade` makes the colours pale enough.
"""

from __future__ import annotations

from string import Template

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fdfdfb; --card: #f3f4f2; --soft: #5b6472; --line: #d5d9df;
  --shade: 50%; --panel: 6.8rem; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eceef1; --paper: #14171c; --card: #1e232a; --soft: #a3acb9; --line: #363d48; --shade: 38%; }
}
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); font: 17px/1.6 system-ui, sans-serif; overflow-wrap: anywhere; }
main { padding: 1.4rem max(1.2rem, 50% - 31.5rem) 4rem; outline: none; }
main > :not(.figures, .reading) { max-width: min(43rem, 100% - 20rem); }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1rem; margin: 2rem 0 .6rem; }
p { margin: 0; }
.soft { color: var(--soft); font-size: .88rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: .6rem; list-style: none;
  margin: 1.2rem 0 0; padding: 0; }
.figures li { background: var(--card); border-radius: 8px; padding: .55rem .8rem; line-height: 1.35; }
.figures b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.prompt, .answer, #tip b, #tip span { unicode-bidi: plaintext; text-align: start; }
.prompt { border-left: 3px solid var(--line); padding-left: .8rem; white-space: pre-wrap; }
.reading { display: grid; grid-template-columns: minmax(0, 43rem) 18rem; gap: 2rem; }

.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 0 0 .7rem; padding: 0; list-style: none;
  font-size: .88rem; }
.legend li { display: flex; align-items: baseline; gap: .45rem; }
.legend i { align-self: center; flex: none; width: 1.1rem; height: 1.1rem; border-radius: 3px; }
.legend u { flex: none; }
.word, .legend i { background: color-mix(in srgb, var(--depth) var(--shade), transparent); print-color-adjust: exact; }
.answer { line-height: 1.95; white-space: pre-wrap; }
.token { cursor: pointer; outline: none; }
.word { padding: .16em 0; border-radius: 3px; box-decoration-break: clone; box-shadow: inset -1px 0 var(--paper); }
.code { font: .9em ui-monospace, monospace; }
.gap:only-child { border-bottom: 1px dotted var(--soft); }
.line::before { content: "↵"; }
.part::before { content: "·"; }
.line::before, .part::before { color: var(--soft); border-radius: 3px; }
.label { display: inline-block; max-width: 100%; margin: 0 .35em; padding: .15em .5em; border: 1px solid var(--soft);
  border-left: 5px solid var(--depth); border-radius: 4px; font: .78rem/1.3 ui-monospace, monospace; }
.label::before { content: attr(data-label) " "; color: var(--soft); font-family: system-ui, sans-serif; }
.other > .word, .other > .gap:only-child, .other > .line, .other > .part, .other > .label, u {
  text-decoration: underline wavy 1.5px; text-underline-offset: 4px; }
.shown > .word, .shown > .gap:only-child, .shown > .label, .shown > .line::before, .shown > .part::before {
  outline: 2px solid var(--ink); }

#tip { position: sticky; top: 1.2rem; align-self: start; display: grid; grid-template-columns: auto 1fr; align-content: start;
  gap: 0 .8rem; height: 8.8rem; margin-top: 2rem; padding: .6rem .9rem; overflow-y: auto; border-radius: 8px;
  border-top: 4px solid var(--depth, var(--line)); background: var(--card); font-size: .86rem; line-height: 1.5; }
#tip b { grid-column: 1 / -1; font: 600 1rem/1.5 ui-monospace, monospace; }
#tip i { font-style: normal; color: var(--soft); }
#tip p { grid-column: 1 / -1; color: var(--soft); }

.row { display: grid; grid-template-columns: 11.5rem 1fr 3rem; gap: .8rem; align-items: center; font-size: .92rem; }
.row > :last-child { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.track { background: var(--card); border-radius: 3px; }
.bar { display: block; height: .9rem; border-radius: 3px; }
pre { margin: 0; white-space: pre-wrap; font: .8rem/1.6 ui-monospace, monospace; background: var(--card); border-radius: 8px;
  padding: .8rem; }
@media print { #tip { display: none; } .reading { display: block; } }
@media screen and (max-width: 55.9rem) {
  main > :not(.figures, .reading) { max-width: none; }
  main { height: calc(100vh - var(--panel)); height: calc(100dvh - var(--panel)); overflow-y: auto; scroll-padding: 1rem;
    padding: 1.4rem max(1.2rem, 50% - 22.5rem) 2rem; }
  .reading { display: block; }
  #tip { position: fixed; inset: auto 0 0; height: var(--panel); margin: 0; border-radius: 0;
    padding: .4rem max(1.2rem, 50% - 22.5rem); }
}
@media (max-width: 30rem) {
  .row { grid-template-columns: 9.5rem 1fr 2.6rem; gap: .5rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures :last-child:nth-child(odd) { grid-column: 1 / -1; }
}
"""

SCRIPT = """
const tip = document.getElementById("tip");
const hint = tip.firstElementChild;
const tokens = [...document.querySelectorAll(".token")];
let shown = null, chosen = null;  // the token in the panel; the one that was clicked or has the focus

function cell(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function show(token) {
  shown?.classList.remove("shown");
  shown?.removeAttribute("aria-describedby");
  shown = token;
  if (!token) {
    tip.style.removeProperty("--depth");
    tip.replaceChildren(hint);
    return;
  }
  const [text, ...rows] = token.dataset.tip.split("\\n");
  const cells = rows.flatMap((row) => row.split("\\t").map((part, place) => cell(place ? "span" : "i", part)));
  tip.replaceChildren(cell("b", text), ...cells);
  tip.style.setProperty("--depth", token.style.getPropertyValue("--depth"));
  token.classList.add("shown");
  token.setAttribute("aria-describedby", "tip");
}

function choose(token) {
  show(chosen = token);
  token?.scrollIntoView({ block: "nearest" });
}

for (const kind of ["focusin", "click"]) {
  document.addEventListener(kind, (event) => {
    if (!event.target.closest("#tip")) choose(event.target.closest(".token"));
  });
}
document.addEventListener("focusout", () => choose(null));
document.addEventListener("mouseover", (event) => {
  const token = event.target.closest(".token");
  if (token) show(token); else if (!event.target.closest(".answer, #tip")) show(chosen);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") choose(null);
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const at = tokens.indexOf(document.activeElement), next = tokens[at + step];
  if (at < 0 || !next) return;
  event.preventDefault();
  tokens[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
document.querySelector("main").focus({ preventScroll: true });  // otherwise keys do not scroll it on a narrow screen
"""

PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>"""
    + STYLE
    + """</style>
</head>
<body>
<main tabindex="-1">
<h1>$name</h1>
<p class="soft">$how</p>
<ul class="figures">$figures</ul>
<h2>Prompt</h2>
<p class="prompt">$prompt</p>
<section class="reading">
<div>
<h2>Answer, coloured by depth</h2>
<ul class="legend" aria-label="Colours">$legend</ul>
<p class="answer">$answer</p>
</div>
<aside id="tip" aria-label="Details of a token"><p>Hover over or tap a token for its depth, router score and the full \
model’s most likely token. Arrow keys move between tokens.</p></aside>
</section>
$depths
$steps
<h2>Summary</h2>
<pre>$summary</pre>
</main>
<script>"""
    + SCRIPT
    + """</script>
</body>
</html>
"""
)

"""The page of a report: what it looks like and how it answers to mouse, finger and keyboard. `report.py` fills it.

Text stays readable on every colour, in light and dark: colours are thinned by `--shade` until it is.
"""

from __future__ import annotations

from string import Template

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fdfdfb; --card: #f3f4f2; --soft: #5b6472; --line: #d5d9df;
  --shade: 50%; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eceef1; --paper: #14171c; --card: #1e232a; --soft: #a3acb9; --line: #363d48; --shade: 38%; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 48rem; padding: 1.4rem 1.2rem 4rem; color: var(--ink); background: var(--paper);
  font: 17px/1.6 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1rem; margin: 2rem 0 .6rem; }
p { margin: 0; }
.soft { color: var(--soft); font-size: .88rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: .6rem; list-style: none;
  margin: 1.2rem 0 0; padding: 0; }
.figures li { background: var(--card); border-radius: 8px; padding: .55rem .8rem; line-height: 1.35; }
.figures b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.prompt { border-left: 3px solid var(--line); padding-left: .8rem; white-space: pre-wrap; }
.answer { line-height: 1.95; margin-bottom: .6rem; white-space: pre-wrap; }
.token { padding: .16em 0; border-radius: 3px; cursor: default; box-shadow: inset -1px 0 var(--paper);
  background: color-mix(in srgb, var(--depth) var(--shade), transparent); }
.token:hover, .token:focus { outline: 2px solid var(--ink); }
.token.other { text-decoration: underline wavy 1.5px; text-underline-offset: 4px; }
.token.line::before { content: "↵"; opacity: .6; }
#tip { position: absolute; display: none; grid-template-columns: auto 1fr; gap: 0 .8rem; padding: .5rem .8rem;
  max-width: min(20rem, calc(100vw - 1rem)); border-radius: 8px; background: var(--ink); color: var(--paper);
  font-size: .86rem; line-height: 1.5; pointer-events: none; }
#tip b { grid-column: 1 / -1; font: 600 1rem/1.5 ui-monospace, monospace; }
#tip i { font-style: normal; opacity: .75; }
.row { display: grid; grid-template-columns: 11.5rem 1fr 3rem; gap: .8rem; align-items: center; font-size: .92rem; }
.row > :last-child { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.track { background: var(--card); border-radius: 3px; }
.bar { display: block; height: .9rem; border-radius: 3px; }
pre { margin: 0; white-space: pre-wrap; font: .8rem/1.6 ui-monospace, monospace; background: var(--card); border-radius: 8px;
  padding: .8rem; }
@media (max-width: 30rem) {
  .row { grid-template-columns: 9.5rem 1fr 2.6rem; gap: .5rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures :last-child:nth-child(odd) { grid-column: 1 / -1; }
}
"""

SCRIPT = """
const tip = document.getElementById("tip");
const tokens = [...document.querySelectorAll(".token")];

function hide() { tip.style.display = "none"; }

function cell(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function show(token) {
  const [text, ...rows] = token.dataset.tip.split("\\n");
  tip.replaceChildren(cell("b", text));
  for (const row of rows) {
    const [name, value] = row.split("\\t");
    tip.append(cell("i", name), cell("span", value));
  }
  tip.style.display = "grid";
  tip.style.left = tip.style.top = "0";
  token.setAttribute("aria-describedby", "tip");
  const box = token.getClientRects()[0], page = document.documentElement;
  const left = Math.max(8, Math.min(box.left, page.clientWidth - tip.offsetWidth - 8));
  const below = box.bottom + 8 + tip.offsetHeight <= page.clientHeight;
  tip.style.left = left + scrollX + "px";
  tip.style.top = (below ? box.bottom + 8 : Math.max(8, box.top - 8 - tip.offsetHeight)) + scrollY + "px";
}

for (const kind of ["mouseover", "focusin", "click"]) {
  document.addEventListener(kind, (event) => {
    const token = event.target.closest(".token");
    if (token) show(token); else hide();
  });
}
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const next = step && tokens[tokens.indexOf(document.activeElement) + step];
  if (!next || !tokens.includes(document.activeElement)) return;
  event.preventDefault();
  document.activeElement.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
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
<h1>$name</h1>
<p class="soft">$how</p>
<ul class="figures">$figures</ul>
<h2>Prompt</h2>
<p class="prompt">$prompt</p>
<h2>Answer</h2>
<p class="answer">$answer</p>
<p class="soft">Coloured by depth. Hover or tap a token, or go from one to the next with the arrow keys.$other</p>
<h2>Where tokens were decided</h2>
$depths
$steps<h2>In numbers</h2>
<pre>$summary</pre>
<div id="tip" role="tooltip"></div>
<script>"""
    + SCRIPT
    + """</script>
</body>
</html>
"""
)

"""The style of the packing page: light and dark as the browser prefers, no script, nothing loaded."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --panel: #ffffff; --ink: #1d2129; --soft: #626a76; --line: #e3e4e1; --track: #eeeeeb;
  --prompt: #4a6fdc; --chosen: #12917a; --rejected: #d9632f; --merged: #8a5bc7; --padding: #c9ccd1;
  --computed: #2f5bd0; --sharing: #8fb0f5; --packing: #d5dceb; --good: #12806b; --warn: #b25712;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --panel: #1d2026; --ink: #e8eaee; --soft: #9aa3b0; --line: #2e333b; --track: #282c33;
    --prompt: #7d9cf5; --chosen: #3fc3a6; --rejected: #f08d5d; --merged: #b48ce8; --padding: #4a505a;
    --computed: #7397f2; --sharing: #4363ab; --packing: #343c4d; --good: #4fc9ae; --warn: #eda35f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 14px; } .soft { color: var(--soft); }
code { font: 0.92em ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace;
  background: var(--track); border-radius: 5px; padding: 1px 5px; }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 12px;
  padding: 22px 24px; margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 12px;
  margin-top: 24px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.card b { display: block; font-size: 25px; line-height: 1.25; letter-spacing: -0.01em; }
.card span { color: var(--soft); font-size: 13px; display: block; line-height: 1.4; }
.card.first b { color: var(--computed); }
.bar { display: flex; width: 100%; height: 22px; border-radius: 4px; overflow: hidden; }
.bar i { display: block; height: 100%; min-width: 0; }
.track { background: var(--track); }
.lines { display: grid; grid-template-columns: auto 1fr auto; gap: 8px 14px; align-items: center; }
.lines .label { white-space: nowrap; } .lines .value { text-align: right; white-space: nowrap; }
.value, td, th { font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px;
  margin: 12px 0 0; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.prompt { background: var(--prompt); } .chosen { background: var(--chosen); }
.rejected { background: var(--rejected); } .merged { background: var(--merged); }
.good { background: var(--good); } .padding { background: var(--padding); }
.computed { background: var(--computed); }
.sharing { background: var(--sharing); } .packing { background: var(--packing); }
.histograms { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 20px; }
.histograms figure { margin: 0; } .histograms svg { display: block; width: 100%; height: 84px; }
.histograms figcaption { font-weight: 600; } .axis { display: flex; justify-content: space-between;
  color: var(--soft); font-size: 12px; border-top: 1px solid var(--line); padding-top: 2px; }
.facts { color: var(--soft); font-size: 13px; margin: 4px 0 0; }
.scroll { overflow-x: auto; } .lines + .scroll { margin-top: 14px; }
table { border-collapse: collapse; width: 100%; min-width: 460px; }
th { color: var(--soft); font-weight: 500; font-size: 13px; } th, td { text-align: right; padding: 6px 10px;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; } tr.pick td { font-weight: 650; color: var(--good); }
.advice { border-left: 3px solid var(--good); padding: 2px 0 2px 14px; margin: 14px 0 0; }
.advice ul { margin: 4px 0 0; padding-left: 18px; color: var(--soft); }
.warn { color: var(--warn); } footer { color: var(--soft); font-size: 13px; margin-top: 22px; }
""".strip()

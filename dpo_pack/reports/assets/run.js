// Draws the curves of a run's page with uPlot. The page has the data as JSON; nothing is loaded.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const many = data.num_runs > 1;
  const PALETTE = ["computed", "rejected", "chosen", "merged", "gold", "pink", "soft"];
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  // Axes have more digits than legends, so that no two ticks look alike.
  const format = (value, digits = 3) => {
    const size = Math.abs(value);
    if (value == null) return "–";
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
    return value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: digits });
  };

  // The running mean of a curve; its first values weigh more, so that it does not begin at 0.
  const smoothed = (values) => {
    let sum = 0, weight = 0;
    return values.map((value) =>
      value == null ? null : (sum = 0.9 * sum + value) / (weight = 0.9 * weight + 1));
  };

  const draw = (element, chart) => {
    const series = [{ label: chart.axis, value: (plot, step) => format(step ?? plot.data[0].at(-1)) }];
    const tables = [], bands = [];
    for (const curve of chart.curves) {
      const { run, label, values: [values, low, high] } = curve, steps = data.steps[curve.steps];
      // Colours tell runs apart, and dashes the curves of a run; a single run's curves differ by colour.
      const number = chart.curves.filter((other) => other.run === run).indexOf(curve);
      const colour = css(many ? PALETTE[run % PALETTE.length]
        : PALETTE.includes(label) ? label : PALETTE[number % PALETTE.length]);
      const dash = many ? DASHES[(number + Math.floor(run / PALETTE.length)) % DASHES.length] : [];
      const textAt = (plot, shown, s, index) => {  // in the legend; without an index the last value
        const at = index == null ? values.findLastIndex((value) => value != null)
          : steps.indexOf(plot.data[0][index]);
        return format(values[at]) + (low?.[at] == null ? "" : ` (${format(low[at])} to ${format(high[at])})`);
      };
      const isSmooth = !low && steps.length > 100;
      const faint = low ? [high, low] : isSmooth && !many ? [values] : [];
      tables.push([steps, isSmooth ? smoothed(values) : values, ...faint]);
      series.push({ label, value: textAt, stroke: colour, width: 1.6, dash, spanGaps: true,
        points: { show: Boolean(low) || steps.length < 3, size: 6, fill: colour } });
      if (low) bands.push({ series: [series.length, series.length + 1], fill: colour + "26" });
      for (const _ of faint) {
        series.push({ class: "hidden", stroke: colour + "48", spanGaps: true, points: { show: false } });
      }
    }
    const numbers = chart.curves.flatMap((curve) => curve.values[0]);
    const isLog = chart.is_log && numbers.every((number) => number == null || number > 0);
    const axis = { stroke: css("soft"), grid: { stroke: css("line"), width: 1 }, ticks: { show: false },
      font: "12px system-ui, sans-serif" };
    return new uPlot({
      width: element.clientWidth, height: 210, series, bands,
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 28, values: (u, ticks) => ticks.map((t) => Number.isInteger(t) ? format(t) : "") },
        { ...axis, size: 58, values: (u, ticks) => ticks.map((t) => t == null ? "" : format(t, 5)) },
      ],
      cursor: { sync: { key: chart.axis }, focus: { prox: many ? 24 : -1 } }, focus: { alpha: 0.25 },
    }, uPlot.join(tables), element);
  };

  const elements = [...document.querySelectorAll(".chart")]; // in the order of data.charts
  let plots = [];
  const drawAll = () => {
    plots.forEach((plot) => plot.destroy());
    plots = elements.map((element, index) => draw(element, data.charts[index]));
  };
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("resize", drawAll);
})();

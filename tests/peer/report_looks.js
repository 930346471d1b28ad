// What is drawn on a page of `spile report`: look() returns facts and faults, and test_report.py judges them.
function parse(colour) {
  const parts = colour.match(/[\d.]+/g).map(Number);
  return {rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1};
}

function luminance(rgb) {
  const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a, b) {
  const [x, y] = [luminance(a), luminance(b)];
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
}

// The colour behind an element: that of the nearest one above it that has one.
function ground(window, element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = parse(window.getComputedStyle(at).backgroundColor);
    if (colour.alpha === 1) return colour.rgb;
  }
  return window.matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
}

function worstContrast(window, document) {
  let worst = {ratio: 99, text: ''};
  const see = (ratio, text) => { if (ratio < worst.ratio) worst = {ratio, text}; };
  for (const text of document.querySelectorAll('svg text')) {
    see(contrast(parse(window.getComputedStyle(text).fill).rgb, ground(window, text.closest('div, figure, body'))), text.textContent);
  }
  const walk = document.createTreeWalker(document.body, 4);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || element.closest('svg, script, style') || !element.getClientRects().length) continue;
    see(contrast(parse(window.getComputedStyle(element).color).rgb, ground(window, element)), walk.currentNode.data);
  }
  return worst;
}

// Texts of one drawing that share a place, or leave it.
function misplaced(svg) {
  const view = svg.viewBox.baseVal, faults = [];
  const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]);
  boxes.forEach(([text, a], number) => {
    const half = 0.5;
    if (a.x < view.x - half || a.y < view.y - half || a.x + a.width > view.width + half || a.y + a.height > view.height + half)
      faults.push(`"${text}" leaves the drawing`);
    for (const [other, b] of boxes.slice(number + 1)) {
      const across = Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x);
      const down = Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y);
      if (across > half && down > half) faults.push(`"${text}" overlaps "${other}"`);
    }
  });
  return faults;
}

// A text of an axis as a number; sizes are in bytes.
function number(text) {
  const parts = text.replace(/[\s\u00a0\u202f]/g, '').match(/^(-?[\d.]+)(B|KiB|MiB|GiB|TiB)?$/);
  return parts ? Number(parts[1]) * 1024 ** Math.max(0, ['B', 'KiB', 'MiB', 'GiB', 'TiB'].indexOf(parts[2])) : NaN;
}

// The scale that texts with these values at these places make, with its function from a value to a place.
function scale(ticks) {
  if (ticks.length < 2) return null;
  const by = f => {
    const [a, b] = [ticks[0], ticks[ticks.length - 1]];
    const at = value => a.place + (f(value) - f(a.value)) / (f(b.value) - f(a.value)) * (b.place - a.place);
    return {at, off: Math.max(...ticks.map(tick => Math.abs(at(tick.value) - tick.place)))};
  };
  const linear = by(value => value);
  if (linear.off < 1) return {kind: 'linear', at: linear.at};
  const log = ticks.every(tick => tick.value > 0) ? by(Math.log) : {off: 99};
  return log.off < 1 ? {kind: 'log', at: log.at} : null;
}

const attribute = (element, name) => Number(element.getAttribute(name));
const lines = (svg, kind, isUpright) => [...svg.querySelectorAll(`line.${kind}`)].filter(line => (line.getAttribute('x1') === line.getAttribute('x2')) === isUpright);
const ticksOf = texts => texts.filter(tick => !Number.isNaN(tick.value));

// The texts at the left of a plot, each beside its rung.
function upTicks(svg) {
  const rungs = lines(svg, 'g', false).map(line => attribute(line, 'y1'));
  const texts = [...svg.querySelectorAll('text[text-anchor=end]')].map(text => ({value: number(text.textContent), place: attribute(text, 'y') - 4}));
  return ticksOf(texts).filter(tick => rungs.some(rung => Math.abs(rung - tick.place) < 0.2));
}

// The texts below a plot, each at the line that is nearest to it: at the edge of a drawing a text moves aside.
function acrossTicks(svg, bottom) {
  const places = lines(svg, 'g', true).map(line => attribute(line, 'x1'));
  const below = [...svg.querySelectorAll('text[text-anchor=middle]')].filter(text => Math.abs(attribute(text, 'y') - bottom - 17) < 0.2);
  const nearest = x => places.reduce((best, place) => Math.abs(place - x) < Math.abs(best - x) ? place : best, Infinity);
  return ticksOf(below.map(text => ({value: number(text.textContent), place: nearest(attribute(text, 'x'))})));
}

// What is wrong with the axes of one drawing, and with the places of its marks, whose rows of the figure's table are `rows`.
function misdrawn(svg, rows) {
  const marks = [...svg.querySelectorAll('.m')];
  if (marks.every(mark => /\bh\d/.test(mark.getAttribute('class')))) return misshaded(marks, rows);
  const bottom = attribute(lines(svg, 'a', false)[0], 'y1');
  const across = scale(acrossTicks(svg, bottom));
  if (!across) return ['the texts below make no scale'];
  return marks[0].tagName === 'rect' ? misplacedBars(svg, marks, rows, across) : misplacedPoints(svg, marks, rows, across, bottom);
}

function misplacedBars(svg, marks, rows, across) {
  const faults = [], zero = attribute(lines(svg, 'a', true).sort((a, b) => Math.abs(attribute(b, 'y2') - attribute(b, 'y1')) - Math.abs(attribute(a, 'y2') - attribute(a, 'y1')))[0], 'x1');
  if (across.kind !== 'linear' || Math.abs(across.at(0) - zero) > 1) faults.push('bars do not begin at 0');
  marks.forEach((mark, place) => {
    const due = across.at(rows[place].value) - across.at(0);
    if (Math.abs(attribute(mark, 'width') - due) > 1.5) faults.push(`the bar of ${rows[place].value} is ${mark.getAttribute('width')} long, not ${due}`);
  });
  return faults;
}

function misplacedPoints(svg, marks, rows, across, bottom) {
  const ticks = upTicks(svg), up = scale(ticks), faults = [];
  if (!up) return ['the texts at the left make no scale'];
  const start = ticks.find(tick => Math.abs(tick.place - bottom) < 1), top = Math.min(...lines(svg, 'g', false).map(line => attribute(line, 'y1')));
  if (!start) faults.push('the axis has no text at its start');
  else if (up.kind === 'linear' && start.value !== 0) faults.push(`a linear axis starts at ${start.value}`);
  const beyond = svg.querySelectorAll('.beyond').length, high = rows.filter(row => up.at(row.value) < top - 1).length;
  if (beyond !== high) faults.push(`${beyond} arrows for ${high} values beyond the axis`);
  marks.forEach((mark, place) => {
    const box = mark.getBBox(), row = rows[place], y = Math.max(up.at(row.value), top);
    if (Math.abs(box.y + box.height / 2 - y) > 1.5) faults.push(`the mark of ${row.value} is at ${box.y + box.height / 2}, not at ${y}`);
    // One or two marks of a name may stand aside of those of other names.
    const isLine = rows.filter(other => other.name === row.name).length > 2;
    if (isLine && Math.abs(box.x + box.width / 2 - across.at(row.at)) > 2) faults.push(`the mark at ${row.at} is at ${box.x + box.width / 2}, not at ${across.at(row.at)}`);
  });
  return faults;
}

function misshaded(marks, rows) {
  const most = Math.max(...rows.map(row => row.value));
  const steps = marks.map(mark => Number(mark.getAttribute('class').match(/\bh(\d)/)[1]));
  return steps.some((step, place) => step !== Math.min(6, Math.floor(rows[place].value / most * 7))) ? ['a cell has the colour of another value'] : [];
}

// The rows of a figure's table, in the order of its marks.
function values(one) {
  const text = cell => cell.textContent;
  const row = cells => ({name: text(cells[0]) + text(cells[1]), at: number(text(cells[2]).replace(/ \(.*/, '')), value: number(text(cells[3]))});
  return [...one.querySelectorAll('details tbody tr')].map(line => row(line.cells));
}

// What is wrong with the axes and marks of a figure: each drawing takes the next rows of the table.
function misdrawnIn(panels, rows) {
  let taken = 0;
  return panels.flatMap(svg => misdrawn(svg, rows.slice(taken, taken += svg.querySelectorAll('.m').length)));
}

function figure(window, document, one) {
  one.focus();
  const drawings = [...one.querySelectorAll('svg.plot')];
  const named = svg => ['title', 'desc'].every(tag => (svg.querySelector(tag)?.textContent || '').trim());
  const panels = drawings.filter(svg => svg.querySelector('.m'));
  const inside = mark => {
    const view = mark.ownerSVGElement.viewBox.baseVal, box = mark.getBBox();
    return box.x >= -1 && box.y >= -1 && box.x + box.width <= view.width + 1 && box.y + box.height <= view.height + 1;
  };
  return {
    name: one.dataset.figure,
    focused: document.activeElement === one,
    outlined: window.getComputedStyle(one).outlineStyle !== 'none',
    panels: panels.length,
    named: drawings.every(svg => svg.getAttribute('role') === 'img' && named(svg)),
    axes: panels.every(svg => svg.querySelectorAll('line.a').length > 0 || svg.querySelector('rect.m[class*=" h"]')),
    ticks: panels.every(svg => svg.querySelectorAll('text').length > 3),
    marks: one.querySelectorAll('.m').length,
    inside: [...one.querySelectorAll('.m')].every(inside),
    values: one.querySelectorAll('details tbody tr').length,
    series: new Set([...one.querySelectorAll('text[class^=t]')].map(text => text.textContent)).size,
    faults: [...drawings.flatMap(misplaced), ...misdrawnIn(panels, values(one))],
    narrowest: Math.min(...drawings.map(svg => svg.getBoundingClientRect().width)),
  };
}

// How far the page is wider than its window when all that can be opened is open.
function overflow(document) {
  const root = document.documentElement, closed = [...document.querySelectorAll('details:not([open])')];
  const isOpened = closed.map(one => { one.querySelector('summary').click(); return one.open; });
  const wide = root.scrollWidth - root.clientWidth;
  closed.forEach(one => one.removeAttribute('open'));
  return isOpened.every(Boolean) ? wide : 9999;
}

function look(window, document) {
  const root = document.documentElement;
  return {
    width: window.innerWidth,
    dark: window.matchMedia('(prefers-color-scheme: dark)').matches,
    overflow: Math.max(root.scrollWidth - root.clientWidth, overflow(document)),
    contrast: worstContrast(window, document),
    figures: [...document.querySelectorAll('figure')].map(one => figure(window, document, one)),
    reachable: [...document.querySelectorAll('figure, summary, .scroll, a')].every(one => one.tabIndex === 0),
    links: [...document.querySelectorAll('a')].every(one => document.getElementById(one.getAttribute('href').slice(1))),
  };
}
